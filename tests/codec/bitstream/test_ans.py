"""`ans`: the native coder, with and without vectors, beside docs/format.md's reader, and what is broken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from benchmarks.codec.ans_tables import level_of
from sgl_kvfetch.codec.bitstream import _ans
from sgl_kvfetch.codec.bitstream.ans import SLOTS, AnsCodec, native_tables, tables
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.layout.regions import region_layout
from sgl_kvfetch.errors import CorruptError
from tests.golden.second_reader import unans

VECTORS, PORTABLE = AnsCodec(), AnsCodec(is_portable=True)
CODECS = pytest.mark.parametrize("codec", [VECTORS, PORTABLE], ids=["vectors", "portable"])


def coefficients(num_rows: int, num_tokens: int, seed: int = 0, widest: float = 40.0) -> torch.Tensor:
    """Rows that become narrower, with a few values that no distribution has, as frames."""
    random = np.random.default_rng(seed)
    widths = np.geomspace(widest, 0.1, num_rows)[:, None] * random.lognormal(0, 0.5, num_tokens)
    values = np.clip(np.round(random.normal(0, widths)) + 128, 0, 255).astype(np.uint8)
    values[random.random(values.shape) < 0.002] = 0
    return region_layout(num_rows, num_tokens, FLAT).to_frames(torch.from_numpy(values))


def decode(codec: AnsCodec, bitstream: bytes, frames: torch.Tensor) -> torch.Tensor:
    return codec.decode(bitstream, (len(frames), *frames.shape[2:]))


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 31, 32, 33, 64, 100, 1024])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_both_coders_and_the_document_agree(num_rows: int, num_tokens: int) -> None:
    frames = coefficients(num_rows, num_tokens)
    bitstream = VECTORS.encode(frames)
    assert PORTABLE.encode(frames) == bitstream
    for codec in (VECTORS, PORTABLE):
        assert torch.equal(decode(codec, bitstream, frames), frames)
    if num_rows * num_tokens <= 4000:
        rows = frames.reshape(-1, num_tokens).numpy()
        assert np.array_equal(unans(bitstream, *rows.shape), rows)


@CODECS
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_integer_comes_back(codec: AnsCodec, data: st.DataObject) -> None:
    num_frames, num_tokens = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 70))
    size = num_frames * 3 * num_tokens
    values = data.draw(st.binary(min_size=size, max_size=size))
    frames = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(num_frames, 3, 1, num_tokens)
    assert torch.equal(decode(codec, codec.encode(frames), frames), frames)


def test_its_size_is_near_the_entropy() -> None:
    """Of integers whose widths are known, which a decoder must learn."""
    random = np.random.default_rng(1)
    values = np.round(random.normal(0, 3.0, (300, 1024))).astype(np.int64)
    counts = np.bincount((values + 128).reshape(-1), minlength=256) / values.size
    entropy = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
    frames = torch.from_numpy((values + 128).astype(np.uint8)).view(100, 3, 1, 1024)
    assert len(VECTORS.encode(frames)) * 8 / values.size < 1.03 * entropy


@CODECS
def test_50000_mutated_bitstreams_decode_to_the_shape_or_are_corrupt(codec: AnsCodec) -> None:
    """A flipped byte may decode to other integers: that is what the checksums are for. It must not do anything else."""
    random = np.random.default_rng(3)
    sources = [(frames := coefficients(9, n), codec.encode(frames)) for n in (3, 40, 128)]
    num_corrupt = 0
    for number in range(50_000):
        frames, bitstream = sources[number % len(sources)]
        bad = np.frombuffer(bitstream, np.uint8).copy()
        places = random.integers(0, len(bad), 1 + number % 4)
        bad[places] ^= random.integers(1, 256, len(places)).astype(np.uint8)
        end = random.integers(0, 2 * len(bad)) if number % 5 == 0 else len(bad)
        try:
            found = decode(codec, np.resize(bad, end).tobytes(), frames)
        except CorruptError:
            num_corrupt += 1
        else:
            assert found.shape == frames.shape
    assert num_corrupt > 49_000  # the states' end tells nearly all


@CODECS
def test_what_is_broken_is_said(codec: AnsCodec) -> None:
    frames = torch.full((10, 3, 1, 64), 128, dtype=torch.uint8)
    bitstream = codec.encode(frames)
    for bad, fault in (
        (b"", "is shorter than its states"),
        (bytes(4) + bitstream[4:], "has a state that is too small"),
        (b"\xff" * 128, "ends too early"),
        (bitstream + b"\0", "has bytes that nothing uses"),
    ):
        with pytest.raises(CorruptError, match=fault):
            decode(codec, bad, frames)


def test_the_tables_are_sound() -> None:
    found = tables()
    assert (found.slots.shape, found.choice.shape, found.gains.shape) == ((48, 257), (64, 32), (64,))
    assert (found.slots.sum(1) == SLOTS).all()
    assert found.slots.max() < SLOTS  # a native entry has 10 bits for it
    assert (found.slots[:, 256] > 0).all()  # every integer can be coded
    assert found.choice.max() < len(found.slots)
    assert level_of(np.array([0, 63, 64, 1024, 16384])).tolist() == [0, 0, 0, 16, 31]


def test_the_native_coder_refuses_wrong_sizes() -> None:
    sound = native_tables()
    for rows, tokens, size in ((0, 8, 0), (2, 8, 15), (-2, -8, 16), (1 << 40, 1 << 40, 16)):
        with pytest.raises(ValueError, match="rows of"):
            _ans.encode(sound, bytes(size), rows, tokens)
    for broken in ((b"", *sound[1:]), (*sound[:2], b"\xff" * 2048, *sound[3:])):
        with pytest.raises(ValueError, match="tables have the wrong sizes"):
            _ans.encode(broken, bytes(16), 2, 8)
