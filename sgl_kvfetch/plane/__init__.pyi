from .arena import SharedPool as SharedPool, consecutive_runs as consecutive_runs
from .config import KVFetchConfig as KVFetchConfig, parse_config as parse_config
from .engine_end import DataPlane as DataPlane
from .protocol import Start as Start, Watch as Watch
from .staging import StagedValues as StagedValues
