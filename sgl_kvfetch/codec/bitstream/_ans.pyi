from collections.abc import Sequence

from typing_extensions import Buffer

Tables = tuple[object, ...]

def encode(tables: Tables, values: Buffer, rows: int, tokens: int, /) -> bytes:
    """Return the bitstream of uint8 ``values``, ``(rows, tokens)``."""

def encode_fitted(tables: Tables, frames: Buffer, tokens: int, rows: int, /) -> tuple[bytes, bytes]:
    """Return distributions for the rows of uint8 ``frames``, ``(tokens, rows)``, uint16 ``(n, 257)``, and the bitstream
    that is coded with them. Rows are clustered by their cost in bits (Lloyd's algorithm). Few integers get few
    distributions, because each must save more bytes than it takes. ``tables`` code which row has which one."""

def entropy_bits(data: Buffer, /) -> float:
    """Return the order-0 entropy of the bytes, in bits a byte."""

def join(pieces: Sequence[Buffer], /) -> bytes:
    """Return the bytes of all pieces one after another."""

def decode(tables: Tables, data: Buffer, rows: int, tokens: int, out: Buffer, /) -> str | None:
    """Decode into ``out``, uint8 ``(rows, tokens)``. Return what is wrong with ``data``, or None."""

def decode_fitted(tables: Tables, slots: Buffer, data: Buffer, tokens: int, rows: int, out: Buffer, /) -> str | None:
    """Decode what `encode_fitted` coded into ``out``, uint8 ``(tokens, rows)``. ``slots``: the distributions.
    ``tables`` code which row has which one. Return what is wrong with ``data``, or None."""

def encode_digits(tables: Tables, values: Buffer, rows: int, tokens: int, /) -> bytes:
    """Return the bitstream of the digits of int16 ``values``, ``(rows, tokens)``: what `refine` needs to restore them
    from a third of each, rounded to the nearest integer."""

def refine(tables: Tables, data: Buffer, rows: int, tokens: int, values: Buffer, /) -> str | None:
    """Replace each n of int16 ``values``, ``(rows, tokens)``, by ``3 n + digit``, in place. Return what is wrong with
    ``data``, or None."""
