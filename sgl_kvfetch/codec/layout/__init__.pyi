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
