from .ans import (
    CLASS_LANES as CLASS_LANES,
    CLASS_TABLE as CLASS_TABLE,
    GROUP as GROUP,
    LANES as LANES,
    SLOTS as SLOTS,
    AnsCodec as AnsCodec,
    decoding_tables as decoding_tables,
)
from .base import Codec as Codec
from .gpu_ans import try_gpu_ans as try_gpu_ans
from .levels import MOST_LEVELS as MOST_LEVELS
from .nvdec import (
    open_current_nvdec as open_current_nvdec,
    open_nvdec as open_nvdec,
    open_nvdec_alone as open_nvdec_alone,
)
from .nvidia import (
    ENCODE_LIBRARY as ENCODE_LIBRARY,
    decode_caps as decode_caps,
    moving_gradients as moving_gradients,
)
