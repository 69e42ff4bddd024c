from .adapt.decode_profile import DecodeProfile as DecodeProfile
from .adapt.pool import Sample as Sample, measure_profile as measure_profile
from .audit import verdicts as verdicts
from .choice import (
    Decision as Decision,
    EngineQueue as EngineQueue,
    FetchLag as FetchLag,
    FetchOrRecompute as FetchOrRecompute,
)
from .client import (
    StoreClient as StoreClient,
    counted as counted,
    level_policy as level_policy,
    open_client as open_client,
    writer_spec as writer_spec,
)
from .coded import StagedCode as StagedCode
from .config import KVFetchConfig as KVFetchConfig, parse_config as parse_config
from .fetch.plan import ReadSize as ReadSize, ReadUnit as ReadUnit, read_units as read_units
from .fetch.sink import (
    Destination as Destination,
    GuardedSink as GuardedSink,
    PagePool as PagePool,
    consecutive_runs as consecutive_runs,
)
from .launch import (
    DataPlaneProcess as DataPlaneProcess,
    DataPlaneThread as DataPlaneThread,
    Launch as Launch,
    Line as Line,
    Running as Running,
)
from .memory_cache import CODE_ALIGNMENT as CODE_ALIGNMENT, MemoryCache as MemoryCache
from .messages import Cost as Cost, Found as Found, SideOver as SideOver, Start as Start, Watch as Watch
from .plane import DataPlane as DataPlane
from .profiles import (
    TakenProfile as TakenProfile,
    take_profile as take_profile,
)
from .quantiser import config_quantiser as config_quantiser
from .run import Quantising as Quantising, ReadSide as ReadSide
from .service import run_data_plane as run_data_plane
from .staging import StagedValues as StagedValues
from .store_options import check_files as check_files
