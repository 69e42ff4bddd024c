from .fit import (
    CalibrationOptions as CalibrationOptions,
    calibrate_model as calibrate_model,
)
from .layer_map import map_layers as map_layers
from .layers import LayeredModel as LayeredModel
from .text import (
    calibration_windows as calibration_windows,
    part_of as part_of,
    tokenise as tokenise,
    without_prompt_start as without_prompt_start,
)
