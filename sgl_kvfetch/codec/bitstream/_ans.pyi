from typing_extensions import Buffer

Tables = tuple[object, ...]

def encode(tables: Tables, values: Buffer, rows: int, tokens: int, classes: Buffer = ..., /) -> bytes:
    """Return the bitstream of uint8 ``values``, ``(rows, tokens)``. ``classes``: uint8 ``(rows,)``. Without them, each
    row's class is computed from its values."""

def decode(tables: Tables, data: Buffer, rows: int, tokens: int, out: Buffer, /) -> str | None:
    """Decode into ``out``, uint8 ``(rows, tokens)``. Return what is wrong with ``data``, or None."""

def encode_digits(tables: Tables, values: Buffer, rows: int, tokens: int, /) -> bytes:
    """Return the bitstream of the digits of int16 ``values``, ``(rows, tokens)``: what `refine` needs to restore them
    from a third of each, rounded to the nearest integer."""

def refine(tables: Tables, data: Buffer, rows: int, tokens: int, values: Buffer, /) -> str | None:
    """Replace each n of int16 ``values``, ``(rows, tokens)``, by ``3 n + digit``, in place. Return what is wrong with
    ``data``, or None."""
