from .frame_sum import (
    GAMMA as GAMMA,
    MIX_1 as MIX_1,
    MIX_2 as MIX_2,
    WORD_BYTES as WORD_BYTES,
    sum_of_frames as sum_of_frames,
)
from .frames import (
    FILL as FILL,
    MIN_PICTURE as MIN_PICTURE,
    PLANES as PLANES,
    RESOLUTIONS as RESOLUTIONS,
    Layout as Layout,
)
from .regions import (
    RegionLayout as RegionLayout,
    region_layout as region_layout,
)
from .tiles import TileLayout as TileLayout
