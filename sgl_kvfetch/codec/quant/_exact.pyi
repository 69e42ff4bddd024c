from typing_extensions import Buffer

def split(values: Buffer, size: int, planes: Buffer, first: int, /) -> None:
    """Write ``values``, uint8 ``(..., n * size)``, which may be strided, into ``size`` planes of equal length: each
    value's bits rotated left by one, a byte in each plane, least significant first. ``first``: where, in a plane."""
