from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codec.baselines import arithmetic


def _symbols(num_streams: int = 40, num_steps: int = 256) -> np.ndarray:
    rng = np.random.default_rng(3)
    spreads = np.linspace(0.05, 6, num_streams)[:, None]
    return np.clip(np.rint(rng.normal(15, spreads, (num_streams, num_steps))), 0, 30).astype(np.uint8)


def _reference_encode(symbols: np.ndarray, table: np.ndarray) -> bytes:
    """One stream, bit by bit, as torchac does it."""
    bits: list[int] = []
    low, high, pending = 0, 0xFFFFFFFF, 0

    def put(bit: int) -> None:
        nonlocal pending
        bits.extend([bit, *([1 - bit] * pending)])
        pending = 0

    for symbol in symbols.tolist():
        span = high - low + 1
        c_low = int(table[symbol])
        c_high = 0x10000 if symbol == len(table) - 2 else int(table[symbol + 1])
        high = low - 1 + ((span * c_high) >> 16)
        low = low + ((span * c_low) >> 16)
        while True:
            if high < 0x80000000:
                put(0)
            elif low >= 0x80000000:
                put(1)
            elif low >= 0x40000000 and high < 0xC0000000:
                pending += 1
                low = (low << 1) & 0x7FFFFFFF
                high = ((high << 1) | 0x80000001) & 0xFFFFFFFF
                continue
            else:
                break
            low = (low << 1) & 0xFFFFFFFF
            high = ((high << 1) | 1) & 0xFFFFFFFF
    pending += 1
    put(0 if low < 0x40000000 else 1)
    bits += [0] * (-len(bits) % 8)
    return np.packbits(np.array(bits, np.uint8)).tobytes()


def test_the_bits_are_those_of_a_coder_that_works_bit_by_bit() -> None:
    symbols = _symbols()
    tables = arithmetic.cumulative(symbols, 32)
    expected = [_reference_encode(row, table) for row, table in zip(symbols, tables, strict=True)]
    assert arithmetic.encode(symbols, tables) == expected


@pytest.mark.parametrize("num_bins", [4, 8, 32, 63])
@pytest.mark.parametrize("num_steps", [1, 2, 255, 256])
def test_symbols_come_back(num_bins: int, num_steps: int) -> None:
    symbols = np.random.default_rng(num_bins).integers(0, num_bins, (50, num_steps)).astype(np.uint8)
    tables = arithmetic.cumulative(symbols, num_bins)
    assert (np.diff(tables.astype(int), axis=1) > 0).all()
    streams = arithmetic.encode(symbols, tables)
    np.testing.assert_array_equal(arithmetic.decode(streams, tables, num_steps), symbols)
