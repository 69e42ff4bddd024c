from .fit import (
    CalibrationOptions as CalibrationOptions,
    calibrate_model as calibrate_model,
)
from .layers import LayeredModel as LayeredModel
from .rope import find_rope as find_rope
from .text import (
    calibration_windows as calibration_windows,
    part_of as part_of,
    tokenise as tokenise,
)
