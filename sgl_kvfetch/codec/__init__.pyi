from .bitstream.ans import (
    CLASS_TABLE as CLASS_TABLE,
    NUM_CLASSES as NUM_CLASSES,
    SLOTS as SLOTS,
    AnsCodec as AnsCodec,
    decoding_tables as decoding_tables,
    encoding_tables as encoding_tables,
    least_sums as least_sums,
)
from .bitstream.base import Codec as Codec, Decoders as Decoders
from .bitstream.gpu_ans import open_gpu_ans as open_gpu_ans
from .bitstream.hevc import HevcCodec as HevcCodec
from .bitstream.levels import MOST_LEVELS as MOST_LEVELS
from .bitstream.nvdec import (
    MAX_SURFACE_BYTES as MAX_SURFACE_BYTES,
    Nvdec as Nvdec,
    open_current_nvdec as open_current_nvdec,
    open_nvdec as open_nvdec,
)
from .bitstream.nvidia import (
    ENCODE_LIBRARY as ENCODE_LIBRARY,
    decode_caps as decode_caps,
    moving_gradients as moving_gradients,
)
from .bitstream.registry import (
    CODECS as CODECS,
    READABLE as READABLE,
    CodecName as CodecName,
    get_codec as get_codec,
    resolution_for as resolution_for,
)
from .calibrate.fit import CalibrationOptions as CalibrationOptions, calibrate_model as calibrate_model
from .calibrate.layers import LayeredModel as LayeredModel
from .calibrate.rope import find_rope as find_rope
from .calibrate.text import calibration_windows as calibration_windows, part_of as part_of, tokenise as tokenise
from .container.encryption import (
    SALT_BYTES as SALT_BYTES,
    EncryptionKeys as EncryptionKeys,
    read_encryption_keys as read_encryption_keys,
)
from .container.manifest import (
    MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES,
    MAX_SEGMENT_PAGES as MAX_SEGMENT_PAGES,
    MAX_SIDES as MAX_SIDES,
    MAX_VARIANTS as MAX_VARIANTS,
    Cell as Cell,
    Level as Level,
    Manifest as Manifest,
    Side as Side,
    Variant as Variant,
    decode_manifest as decode_manifest,
    encryption_keys_of as encryption_keys_of,
    may_lose_levels as may_lose_levels,
    require_rewritable as require_rewritable,
    split_signature as split_signature,
    whole_of as whole_of,
    without_last_level as without_last_level,
)
from .container.merge import merge_segments as merge_segments
from .container.pages import Pages as Pages, QuantisedPages as QuantisedPages, RawPages as RawPages
from .container.partial import is_part as is_part, part_with as part_with
from .container.reader import (
    CellFrames as CellFrames,
    CodedCell as CodedCell,
    CodedChunk as CodedChunk,
    SegmentReader as SegmentReader,
    cell_place as cell_place,
    first_readable as first_readable,
)
from .container.secured import (
    open_manifest as open_manifest,
    plain_segment as plain_segment,
    secure_rows as secure_rows,
    secure_segment as secure_segment,
)
from .container.segment import (
    CodedSegment as CodedSegment,
    SegmentSpec as SegmentSpec,
    encode_cell as encode_cell,
    encode_pages as encode_pages,
    encode_segment as encode_segment,
    layouts_of as layouts_of,
    make_variant as make_variant,
)
from .container.sides import (
    SideKey as SideKey,
    SidePlace as SidePlace,
    encode_side as encode_side,
    places_in as places_in,
    side_places as side_places,
)
from .container.signing import (
    TRAILER_BYTES as TRAILER_BYTES,
    ManifestKeys as ManifestKeys,
    read_manifest_keys as read_manifest_keys,
    split_trailer as split_trailer,
)
from .cuda_streams import Device as Device, Event as Event, Fence as Fence, Stream as Stream
from .fingerprint import (
    digest_file as digest_file,
    digest_files as digest_files,
    fingerprint_model as fingerprint_model,
)
from .layout.frame_sum import (
    GAMMA as GAMMA,
    MIX_1 as MIX_1,
    MIX_2 as MIX_2,
    WORD_BYTES as WORD_BYTES,
    sum_of_frames as sum_of_frames,
)
from .layout.frames import (
    FILL as FILL,
    MIN_PICTURE as MIN_PICTURE,
    PLANES as PLANES,
    RESOLUTIONS as RESOLUTIONS,
    Layout as Layout,
)
from .layout.regions import RegionLayout as RegionLayout, region_layout as region_layout
from .layout.tiles import TileLayout as TileLayout
from .quant.base import (
    ByteInverse as ByteInverse,
    CellPlace as CellPlace,
    CellValues as CellValues,
    Inverse as Inverse,
    Quantised as Quantised,
    Quantiser as Quantiser,
    StepInverse as StepInverse,
    TransformInverse as TransformInverse,
    join_parts as join_parts,
)
from .quant.exact import from_planes as from_planes
from .quant.klt import (
    KltForward as KltForward,
    KltQuantiser as KltQuantiser,
    exact_bytes as exact_bytes,
    require_grid as require_grid,
    scales_of as scales_of,
)
from .quant.packed import pack as pack
from .quant.profile import (
    Calibration as Calibration,
    Profile as Profile,
    load_profile as load_profile,
    require_targets as require_targets,
)
from .quant.registry import (
    PlainQuantiserName as PlainQuantiserName,
    QuantiserName as QuantiserName,
    make_quantiser as make_quantiser,
    quantiser_from_identity as quantiser_from_identity,
)
from .quant.rope import Rope as Rope
from .quant.symmetric import MAX_BINS as MAX_BINS, MIN_BINS as MIN_BINS
