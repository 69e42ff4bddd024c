from .bitstream.ans import CLASS_LANES as CLASS_LANES, read_tables as read_tables
from .bitstream.base import Decoders as Decoders, require_writable as require_writable
from .bitstream.registry import CODECS as CODECS
from .calibrate.fit import CalibrationOptions as CalibrationOptions, calibrate_model as calibrate_model
from .calibrate.layer_map import map_layers as map_layers
from .calibrate.layers import LayeredModel as LayeredModel
from .container.encryption import NO_KEYS as NO_KEYS, TAG_BYTES as TAG_BYTES, StoreKeys as StoreKeys
from .container.manifest import (
    MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES,
    Cell as Cell,
    Manifest as Manifest,
    coarsened as coarsened,
    decode_manifest as decode_manifest,
    require_rewritable as require_rewritable,
)
from .container.objects import (
    MAX_SEGMENT_PAGES as MAX_SEGMENT_PAGES,
    Content as Content,
    Variant as Variant,
    bytes_of as bytes_of,
    views_of as views_of,
)
from .container.pages import Pages as Pages, RawPages as RawPages
from .container.protect import open_manifest as open_manifest, secure_segment as secure_segment
from .container.reader import (
    CellChunks as CellChunks,
    CodedChunk as CodedChunk,
    SegmentReader as SegmentReader,
)
from .container.segment import (
    CodedSegment as CodedSegment,
    EncodedSegment as EncodedSegment,
    SegmentSpec as SegmentSpec,
)
from .container.sides import SidePlace as SidePlace
from .cuda_streams import Device as Device, Fence as Fence, Stream as Stream, why_no_gpu as why_no_gpu
from .fingerprint import fingerprint_model as fingerprint_model
from .layout.frames import PLANES as PLANES
from .quant.base import (
    CellPlace as CellPlace,
    CellValues as CellValues,
    Quantised as Quantised,
    Quantiser as Quantiser,
)
from .quant.klt import KltQuantiser as KltQuantiser, pack as pack
from .quant.profile import (
    Calibration as Calibration,
    Profile as Profile,
    load_profile as load_profile,
    read_outline as read_outline,
)
from .quant.registry import quantiser_from_identity as quantiser_from_identity
from .tensors import compress as compress, decompress as decompress
