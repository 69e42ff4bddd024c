from typing_extensions import Buffer

Tables = tuple[object, ...]

def encode(tables: Tables, values: Buffer, rows: int, tokens: int, classes: Buffer = ..., /) -> bytes:
    """Return the bitstream of uint8 ``values``, ``(rows, tokens)``. ``classes``: uint8 ``(rows,)``; without them, they
    follow from the values."""

def decode(tables: Tables, data: Buffer, rows: int, tokens: int, out: Buffer, /) -> str | None:
    """Decode into ``out``, uint8 ``(rows, tokens)``. Return what is wrong with ``data``, or None."""

def encode_digits(tables: Tables, values: Buffer, rows: int, tokens: int, /) -> bytes:
    """Return the bitstream that leads from thirds of int16 ``values``, ``(rows, tokens)``, rounded, to them."""

def refine(tables: Tables, data: Buffer, rows: int, tokens: int, values: Buffer, /) -> str | None:
    """Refine int16 ``values``, ``(rows, tokens)``, in place. Return what is wrong with ``data``, or None."""
