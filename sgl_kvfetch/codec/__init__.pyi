from .bitstream.base import Decoders as Decoders
from .bitstream.nvdec import Nvdec as Nvdec
from .bitstream.registry import (
    CODECS as CODECS,
    READABLE as READABLE,
    CodecName as CodecName,
    decode_cost as decode_cost,
    get_codec as get_codec,
    resolution_for as resolution_for,
    writers_resolution as writers_resolution,
)
from .container.encryption import EncryptionKeys as EncryptionKeys, read_encryption_keys as read_encryption_keys
from .container.manifest import (
    MAX_MANIFEST_BYTES as MAX_MANIFEST_BYTES,
    MAX_SIDES as MAX_SIDES,
    MAX_VARIANTS as MAX_VARIANTS,
    Cell as Cell,
    Manifest as Manifest,
    decode_manifest as decode_manifest,
    require_rewritable as require_rewritable,
)
from .container.objects import (
    MAX_SEGMENT_PAGES as MAX_SEGMENT_PAGES,
    DataObject as DataObject,
    Side as Side,
    Variant as Variant,
)
from .container.partial import (
    is_vouched_for as is_vouched_for,
    num_droppable as num_droppable,
    signed_by as signed_by,
    without_last_level as without_last_level,
)
from .container.pieces import Content as Content, bytes_of as bytes_of, views_of as views_of
from .container.protect import open_manifest as open_manifest, secure_segment as secure_segment
from .container.reader import SegmentReader as SegmentReader
from .container.segment import (
    CodedSegment as CodedSegment,
    EncodedSegment as EncodedSegment,
    SegmentSpec as SegmentSpec,
    encode_segment as encode_segment,
)
from .container.sides import SideKey as SideKey, SidePlace as SidePlace
from .container.signing import ManifestKeys as ManifestKeys, read_manifest_keys as read_manifest_keys
from .cuda_streams import (
    GPU_ENV as GPU_ENV,
    Device as Device,
    Event as Event,
    Fence as Fence,
    Stream as Stream,
    why_no_gpu as why_no_gpu,
)
from .fingerprint import (
    digest_file as digest_file,
    digest_files as digest_files,
    fingerprint_model as fingerprint_model,
    model_folder as model_folder,
)
from .quant.base import CellPlace as CellPlace, CellValues as CellValues, Quantised as Quantised, Quantiser as Quantiser
from .quant.klt import KltQuantiser as KltQuantiser
from .quant.profile import Profile as Profile, load_profile as load_profile
from .quant.registry import (
    PlainQuantiserName as PlainQuantiserName,
    QuantiserName as QuantiserName,
    make_quantiser as make_quantiser,
    quantiser_from_identity as quantiser_from_identity,
)
