"""The arithmetic coder of torchac and LMCache (``csrc/ac_enc.cu``, ``ac_dec.cu``), for many streams side by side.

It has 32-bit registers and 16-bit cumulative frequencies of order 0. The original writes single bits and holds back
those that a carry may still change. Here ``low`` is accumulated at full length in 16-bit words, and carries are
resolved at the end. This gives the same bits and lets numpy work on all streams at once.
"""

from __future__ import annotations

import numpy as np

from sgl_kvfetch.errors import CorruptError

_PRECISION = 16
_MASK = np.int64(0xFFFFFFFF)
_HALF = np.int64(0x80000000)
_QUARTER = np.int64(0x40000000)
_WORD_BITS = 16
_FINAL_BITS = 2


def cumulative(symbols: np.ndarray, num_bins: int) -> np.ndarray:
    """Return each stream's table, uint16 ``(streams, num_bins + 1)``, strictly increasing. ``symbols``: ``(streams,
    steps)``, each below ``num_bins``. As LMCache's ``calculate_cdf``."""
    num_streams, num_steps = symbols.shape
    at = symbols.astype(np.int64) + np.arange(num_streams)[:, None] * num_bins
    counts = np.bincount(at.ravel(), minlength=num_streams * num_bins).reshape(num_streams, num_bins)
    table = np.zeros((num_streams, num_bins + 1), np.int64)
    np.cumsum(counts, axis=1, out=table[:, 1:])
    frequencies: np.ndarray = (0xFFFF - num_bins) * table // num_steps + np.arange(num_bins + 1)
    return frequencies.astype(np.uint16)


def encode(symbols: np.ndarray, tables: np.ndarray) -> list[bytes]:
    """Encode ``symbols`` ``(streams, steps)`` with ``tables`` from ``cumulative``. Return each stream's bytes."""
    num_streams, num_steps = symbols.shape
    rows = np.arange(num_streams)
    lows, highs = _bounds(tables)
    words = np.zeros((num_streams, num_steps + 6), np.int64)  # a symbol costs 16 bits at most
    low, high = np.zeros(num_streams, np.int64), np.full(num_streams, _MASK)
    position = np.zeros(num_streams, np.int64)  # in bits
    for symbol in symbols.T.astype(np.intp):
        span = high - low + 1
        added = (span * lows[rows, symbol]) >> _PRECISION
        high = low - 1 + ((span * highs[rows, symbol]) >> _PRECISION)
        low = low + added
        _add(words, rows, position, added)
        low, high, shift, _ = _renormalised(low, high)
        position += shift
    _add(words, rows, position, np.where(low < _QUARTER, _QUARTER, _HALF) - low)
    return _to_streams(words, position + _FINAL_BITS)


def decode(streams: list[bytes], tables: np.ndarray, num_steps: int) -> np.ndarray:
    """Decode the symbols, uint8 ``(streams, num_steps)``. Raises CorruptError for a stream that is too long."""
    num_streams = len(streams)
    rows = np.arange(num_streams)
    lows, highs = _bounds(tables)
    data = np.zeros((num_streams, 2 * num_steps + 16), np.int64)
    for row, stream in enumerate(streams):
        if len(stream) > 2 * num_steps + 8:
            raise CorruptError(f"stream {row} has {len(stream)} bytes, too many for {num_steps} symbols")
        data[row, : len(stream)] = np.frombuffer(stream, np.uint8)
    out = np.empty((num_steps, num_streams), np.uint8)
    low, high = np.zeros(num_streams, np.int64), np.full(num_streams, _MASK)
    value = (data[:, 0] << 24) | (data[:, 1] << 16) | (data[:, 2] << 8) | data[:, 3]
    position = np.full(num_streams, 32, np.int64)
    for step in range(num_steps):
        span = high - low + 1
        count = (((value - low + 1) << _PRECISION) - 1) // span
        symbol = (lows <= count[:, None]).sum(1) - 1
        out[step] = symbol
        high = low - 1 + ((span * highs[rows, symbol]) >> _PRECISION)
        low = low + ((span * lows[rows, symbol]) >> _PRECISION)
        low, high, shift, straddles = _renormalised(low, high)
        value = ((value << shift) & _MASK) | _read(data, rows, position, shift)
        value ^= np.where(straddles, _HALF, 0)
        position += shift
    return out.T


def _bounds(tables: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each symbol's interval. The last one ends at 2^16, which does not fit into the table's uint16."""
    lows = tables[:, :-1].astype(np.int64)
    highs = tables[:, 1:].astype(np.int64)
    highs[:, -1] = 1 << _PRECISION
    return lows, highs


def _renormalised(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Shift out the leading bits that ``low`` and ``high`` share. Then shift out those where they straddle the middle
    (``low`` 011..., ``high`` 100...), but keep the first bit. Return both, the shift, and which streams straddled.
    """
    shared = 32 - _bit_length(low ^ high)
    low = (low << shared) & _MASK
    high = ((high << shared) | ((1 << shared) - 1)) & _MASK
    straddled = 31 - _bit_length(~(low & ~high) & (_HALF - 1))
    low = (low << straddled) & (_HALF - 1)
    high = ((high << straddled) | ((1 << straddled) - 1) | _HALF) & _MASK
    return low, high, shared + straddled, straddled > 0


def _bit_length(x: np.ndarray) -> np.ndarray:
    return np.frexp(x.astype(np.float64))[1].astype(np.int64)


def _add(words: np.ndarray, rows: np.ndarray, position: np.ndarray, value: np.ndarray) -> None:
    """Add 32-bit values, which may be negative, at bit ``position`` of each row. A word may exceed 16 bits."""
    shifted = value << (_WORD_BITS - position % _WORD_BITS)
    word = position // _WORD_BITS
    words[rows, word] += shifted >> 32
    words[rows, word + 1] += (shifted >> 16) & 0xFFFF
    words[rows, word + 2] += shifted & 0xFFFF


def _to_streams(words: np.ndarray, num_bits: np.ndarray) -> list[bytes]:
    for word in range(words.shape[1] - 1, 0, -1):
        words[:, word - 1] += words[:, word] >> _WORD_BITS
        words[:, word] &= 0xFFFF
    rows = words.astype(">u2").view(np.uint8)
    return [row[: -(-bits // 8)].tobytes() for row, bits in zip(rows, num_bits.tolist(), strict=True)]


def _read(data: np.ndarray, rows: np.ndarray, position: np.ndarray, num_bits: np.ndarray) -> np.ndarray:
    """Read ``num_bits``, at most 32, at bit ``position`` of each row."""
    byte = np.minimum(position >> 3, data.shape[1] - 5)
    window: np.ndarray = np.zeros(len(rows), np.int64)
    for i in range(5):
        window = (window << 8) | data[rows, byte + i]
    found: np.ndarray = (window >> (40 - (position & 7) - num_bits)) & ((1 << num_bits) - 1)
    return found
