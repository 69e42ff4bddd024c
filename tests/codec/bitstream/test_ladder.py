"""Levels of coefficients: the native coder, with and without vectors, beside docs/format.md's reader."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.codec.bitstream.base import Wide
from sgl_kvfetch.codec.bitstream.ladder import decode_ladder, encode_ladder
from sgl_kvfetch.codec.layout.frames import FLAT, region_layout
from tests.codec.bitstream.mutations import Case, share_that_is_corrupt
from tests.golden.second_reader import unladder

PORTABLE = pytest.mark.parametrize("is_portable", [False, True], ids=["vectors", "portable"])


def coefficients(num_rows: int, num_tokens: int, widest: float = 40.0, seed: int = 0) -> np.ndarray:
    """Return rows that become narrower, int64 ``(rows, tokens)``."""
    random = np.random.default_rng(seed)
    widths = np.geomspace(widest, 0.1, num_rows)[:, None] * random.lognormal(0, 0.5, num_tokens)
    return np.round(random.normal(0, widths)).astype(np.int64)


def integers_of(values: np.ndarray, wide: list[Wide]) -> np.ndarray:
    rows = values.copy()
    high = [(values[row] + 2 ** (bits - 1)) >> bits for row, bits in wide]
    for (row, bits), each in zip(wide, high, strict=True):
        rows[row] -= each << bits
    whole = np.concatenate((rows, *(each[None] for each in high)))
    return (whole.clip(-128, 127) + 128).astype(np.uint8)


def values_of(integers: np.ndarray, wide: list[Wide]) -> np.ndarray:
    values = integers.astype(np.int64) - 128
    for i, (row, bits) in enumerate(wide):
        values[row] += values[len(values) - len(wide) + i] << bits
    return values[: len(values) - len(wide)]


def frames_of(integers: np.ndarray) -> torch.Tensor:
    return region_layout(integers.shape[0], integers.shape[1], FLAT).to_frames(torch.from_numpy(integers))


def decode(
    levels: list[bytes], frames: torch.Tensor, is_portable: bool = False, num_levels: int | None = None
) -> torch.Tensor:
    """``num_levels``: by default, as many as the first one says."""
    return decode_ladder(levels, num_levels or levels[0][0], (len(frames), *frames.shape[2:]), is_portable=is_portable)


@pytest.mark.parametrize("num_tokens", [1, 5, 32, 33, 1024])
@pytest.mark.parametrize("num_levels", [2, 3, 4])
@pytest.mark.parametrize("wide", [[], [Wide(0, 3), Wide(2, 1)]], ids=["narrow", "wide"])
def test_each_level_is_the_nearest_multiple_of_its_unit(wide: list[Wide], num_levels: int, num_tokens: int) -> None:
    integers = integers_of(coefficients(9, num_tokens, 90.0 if wide else 30.0), wide)
    frames, values = frames_of(integers), values_of(integers, wide)
    levels = encode_ladder(frames, wide, len(integers), num_levels)
    assert encode_ladder(frames, wide, len(integers), num_levels, is_portable=True) == levels
    for count in range(1, num_levels + 1):
        decoded = decode(levels[:count], frames)
        assert torch.equal(decode(levels[:count], frames, is_portable=True), decoded)
        found = decoded.reshape(-1, num_tokens).numpy()[: len(integers)]
        unit = 3 ** (num_levels - count)
        expected = np.round(values / unit).astype(np.int64) * unit
        whole = [row for row in range(9) if row not in dict(wide)]
        assert np.array_equal(values_of(found, wide)[whole], expected[whole].clip(-128, 127))
        assert np.abs(values_of(found, wide) - values).max() <= unit // 2
        if num_tokens < 100:
            assert np.array_equal(unladder(levels[:count], len(integers), num_tokens), found)
    assert torch.equal(decoded, frames)


@PORTABLE
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_integer_comes_back(is_portable: bool, data: st.DataObject) -> None:
    num_frames, num_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    num_levels = data.draw(st.integers(2, 4))
    size = num_frames * 3 * num_tokens
    values = data.draw(st.binary(min_size=size, max_size=size))
    frames = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(num_frames, 3, 1, num_tokens)
    levels = encode_ladder(frames, [], 3 * num_frames, num_levels, is_portable=is_portable)
    assert torch.equal(decode(levels, frames, is_portable), frames)


def test_levels_cost_little_more_than_all_at_once() -> None:
    frames = frames_of(integers_of(coefficients(300, 1024, 20.0), []))
    at_once = len(AnsCodec().encode(frames))
    assert sum(map(len, encode_ladder(frames, [], 300, 3))) < 1.02 * at_once


@pytest.mark.parametrize("num_levels", [2, 3, 4])
def test_the_largest_coefficients_come_back(num_levels: int) -> None:
    """Those that a byte does not hold at the first level's step."""
    wide = [Wide(row, row + 1) for row in range(8)]
    most = np.array([[127 * 2**bits + 2 ** (bits - 1) - 1] for _, bits in wide])
    integers = integers_of(np.concatenate((most, -most, np.zeros_like(most)), 1).repeat(12, 1), wide)
    levels = encode_ladder(frames_of(integers), wide, len(integers), num_levels)
    assert torch.equal(decode(levels, frames_of(integers)), frames_of(integers))
    coarse = decode(levels[:1], frames_of(integers)).reshape(-1, 36).numpy()[: len(integers)]
    assert np.array_equal(unladder(levels[:1], *integers.shape), coarse)
    assert np.abs(values_of(coarse, wide) - values_of(integers, wide)).max() <= 3 ** (num_levels - 1) // 2


@pytest.mark.slow
@PORTABLE
def test_mutated_levels_decode_to_the_shape_or_are_corrupt(is_portable: bool) -> None:
    def case(frames: torch.Tensor, levels: list[bytes], which: int) -> Case:
        before, after = levels[:which], levels[which + 1 :]
        return levels[which], frames, lambda bad: decode([*before, bad, *after], frames, is_portable, 3)

    wide, cases = [Wide(1, 2)], list[Case]()
    for num_tokens in (3, 40, 128):
        integers = integers_of(coefficients(8, num_tokens), wide)
        levels = encode_ladder(frames_of(integers), wide, len(integers), 3)
        cases += [case(frames_of(integers), [*levels], which) for which in range(3)]
    assert share_that_is_corrupt(cases, 5_000, head_bytes=16) > 0.95
