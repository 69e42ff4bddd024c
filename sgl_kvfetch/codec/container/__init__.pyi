from .encryption import SALT_BYTES as SALT_BYTES, TAG_BYTES as TAG_BYTES
from .manifest import (
    encryption_keys_of as encryption_keys_of,
    split_signature as split_signature,
)
from .merge import merge_segments as merge_segments
from .pages import (
    Pages as Pages,
    QuantisedPages as QuantisedPages,
    RawPages as RawPages,
)
from .partial import (
    coarser_by as coarser_by,
    part_with as part_with,
)
from .protect import (
    plain_segment as plain_segment,
    secure_side as secure_side,
)
from .reader import (
    CodedChunk as CodedChunk,
    cell_place as cell_place,
    first_readable as first_readable,
)
from .segment import (
    encode_cell as encode_cell,
    encode_pages as encode_pages,
    encode_span as encode_span,
    layouts_of as layouts_of,
    make_variant as make_variant,
)
from .sides import (
    encode_side as encode_side,
    places_in as places_in,
    side_places as side_places,
)
from .signing import (
    TRAILER_BYTES as TRAILER_BYTES,
    split_trailer as split_trailer,
)
