from collections.abc import Sequence

from typing_extensions import Buffer

def split(values: Buffer, planes: Sequence[Buffer], first: int, /) -> None:
    """Write ``values``, uint8 ``(..., n * size)``, which may be strided, into ``size`` planes of equal length, from
    ``first`` on: each value's bits rotated left by one, a byte in each plane, least significant first."""

def join(planes: Sequence[Buffer], values: Buffer, /) -> None:
    """Write into ``values``, as `split` takes them, what is in the planes from their beginning."""
