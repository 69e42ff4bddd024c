from .data_plane import DataPlane as DataPlane
from .process import Peer as Peer
