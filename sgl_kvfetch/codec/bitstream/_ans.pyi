from typing_extensions import Buffer

Tables = tuple[object, ...]

def encode(tables: Tables, values: Buffer, rows: int, tokens: int, /) -> bytes:
    """Return the bitstream of uint8 ``values``, ``(rows, tokens)``."""

def decode(tables: Tables, data: Buffer, rows: int, tokens: int, out: Buffer, /) -> str | None:
    """Decode into ``out``, uint8 ``(rows, tokens)``. Return what is wrong with ``data``, or None."""
