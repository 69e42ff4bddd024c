from collections.abc import Sequence

from typing_extensions import Buffer

def split(values: Buffer, planes: Sequence[Buffer], first: int, /) -> None:
    """Write ``values``, uint8 ``(..., n * size)``, which may be strided, into ``size`` planes of equal length, from
    ``first`` on: each value's bits rotated left by one, a byte in each plane, least significant first."""

def join(planes: Sequence[Buffer], pages: Buffer, places: Buffer, /) -> None:
    """Write what is in the planes, a page's values after another's, into uint8 ``pages``, ``(pages, ..., n * size)``,
    which may be strided. ``places``: int64 ``(n,)``, for each page in the planes which of ``pages`` it is; -1 for one
    that goes nowhere."""
