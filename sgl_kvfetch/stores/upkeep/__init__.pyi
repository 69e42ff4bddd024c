from .eviction import LIVE_RANK_SQL as LIVE_RANK_SQL
from .listing import (
    Objects as Objects,
    StoredSegment as StoredSegment,
    decode_named_manifest as decode_named_manifest,
    first_readable_manifest as first_readable_manifest,
    folders_named as folders_named,
    list_segments as list_segments,
    names_of_folders as names_of_folders,
    pages_stored as pages_stored,
    read_manifest as read_manifest,
    stored_page_sizes as stored_page_sizes,
    whole_pages as whole_pages,
)
from .sweep import Plan as Plan, Swept as Swept, plan_sweep as plan_sweep, sweep_segments as sweep_segments
