from .data_plane import DataPlane as DataPlane
