from .base import (
    TransformInverse as TransformInverse,
)
from .exact import from_planes as from_planes
from .klt import (
    KltForward as KltForward,
    exact_bytes as exact_bytes,
    require_grid as require_grid,
    scales_of as scales_of,
)
from .layer_map import plain_layers as plain_layers
from .packed import pack as pack
from .profile import (
    Calibration as Calibration,
    require_targets as require_targets,
)
from .rope import Rope as Rope, Rotations as Rotations
from .symmetric import (
    MAX_BINS as MAX_BINS,
    MIN_BINS as MIN_BINS,
)
