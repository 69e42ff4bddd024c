from .arena import (
    CODE_ALIGNMENT as CODE_ALIGNMENT,
    Arena as Arena,
    Emit as Emit,
    Line as Line,
    Room as Room,
    SharedPool as SharedPool,
    StagedValues as StagedValues,
    StridedPages as StridedPages,
    tensors_in as tensors_in,
)
from .config import KVFetchConfig as KVFetchConfig, parse_config as parse_config
from .messages import Start as Start, TakenProfile as TakenProfile, Watch as Watch
from .quantiser import (
    cell_places as cell_places,
    config_quantiser as config_quantiser,
    require_profile_file as require_profile_file,
)
