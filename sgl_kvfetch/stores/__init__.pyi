from .base import (
    AdminStore as AdminStore,
    Lookup as Lookup,
    ObjectInfo as ObjectInfo,
    SegmentHit as SegmentHit,
    Store as Store,
    WrappedStore as WrappedStore,
    is_namespace as is_namespace,
    object_digest as object_digest,
    require_name as require_name,
    require_namespace as require_namespace,
)
from .breaker import Breaker as Breaker
from .coverage import furthest as furthest
from .eviction import LIVE_RANK_SQL as LIVE_RANK_SQL
from .http_answers import client_errors as client_errors
from .keyed import with_keys as with_keys
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
from .open import (
    S3Options as S3Options,
    open_hedged as open_hedged,
    open_remote as open_remote,
    split_store_url as split_store_url,
    takes_token as takes_token,
)
from .pins import (
    MAX_LABEL as MAX_LABEL,
    MAX_PIN_BYTES as MAX_PIN_BYTES,
    MAX_PIN_PAGES as MAX_PIN_PAGES,
    MAX_PINNED_PART as MAX_PINNED_PART,
    Pin as Pin,
    decode_pin as decode_pin,
    pinned_segments as pinned_segments,
    require_pin_name as require_pin_name,
)
from .profiles import (
    MAX_HEAD_BYTES as MAX_HEAD_BYTES,
    MAX_PROFILE_BYTES as MAX_PROFILE_BYTES,
    MAX_PROFILES as MAX_PROFILES,
    MAX_PROFILES_PART as MAX_PROFILES_PART,
    ListedProfile as ListedProfile,
    ProfileKeys as ProfileKeys,
    ProfileRow as ProfileRow,
    is_profile_name as is_profile_name,
    list_profiles as list_profiles,
    parse_head as parse_head,
    profile_rows as profile_rows,
    publish_profile as publish_profile,
    read_profile as read_profile,
    require_profile_length as require_profile_length,
    require_profile_name as require_profile_name,
)
from .redis_index import IndexOptions as IndexOptions, PageIndex as PageIndex
from .remote import HttpOptions as HttpOptions, TlsFiles as TlsFiles
from .sweep import Plan as Plan, Swept as Swept, plan_sweep as plan_sweep, sweep_segments as sweep_segments
from .wire import (
    BYTES_TYPE as BYTES_TYPE,
    MAX_FOLDERS as MAX_FOLDERS,
    MAX_LOOKUP_ANSWER_BYTES as MAX_LOOKUP_ANSWER_BYTES,
    MAX_LOOKUP_PAGES as MAX_LOOKUP_PAGES,
    MAX_LOOKUP_REQUEST_BYTES as MAX_LOOKUP_REQUEST_BYTES,
    MSGPACK_TYPE as MSGPACK_TYPE,
    NDJSON_TYPE as NDJSON_TYPE,
    PAGE_PATHS as PAGE_PATHS,
    Checked as Checked,
    Deleted as Deleted,
    ErrorBody as ErrorBody,
    Folders as Folders,
    LookupRequest as LookupRequest,
    PinNames as PinNames,
    Profiles as Profiles,
    Route as Route,
    parse_entity_tag as parse_entity_tag,
)
