"""`ans`: the native coder, with and without vectors, beside docs/format.md's reader, and what is broken."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import zstandard

from sgl_kvfetch.codec.bitstream.ans import SLOTS, AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import Codec
from sgl_kvfetch.codec.layout.frames import FLAT, region_layout
from sgl_kvfetch.errors import CorruptError
from tests.golden.second_reader import unans, unans_tables

VECTORS, PORTABLE = AnsCodec(), AnsCodec(is_portable=True)
TABLES, PORTABLE_TABLES = AnsTablesCodec(), AnsTablesCodec(is_portable=True)


def coefficients(num_rows: int, num_tokens: int, seed: int = 0, widest: float = 40.0) -> torch.Tensor:
    """Rows that become narrower, with a few values that no distribution has, as frames."""
    random = np.random.default_rng(seed)
    widths = np.geomspace(widest, 0.1, num_rows)[:, None] * random.lognormal(0, 0.5, num_tokens)
    values = np.clip(np.round(random.normal(0, widths)) + 128, 0, 255).astype(np.uint8)
    values[random.random(values.shape) < 0.002] = 0
    return region_layout(num_rows, num_tokens, FLAT).to_frames(torch.from_numpy(values))


def channels(num_tokens: int, num_places: int, seed: int = 0) -> torch.Tensor:
    """Return frames whose places have different, skewed distributions, far from 128, and some values that are rare."""
    random = np.random.default_rng(seed)
    shape = num_tokens, 3 * num_places
    values = random.poisson(random.uniform(0.1, 60, shape[1]), shape) + random.integers(0, 100, shape[1])
    values[random.random(shape) < 0.002] = 255
    return torch.from_numpy(values.clip(0, 255).astype(np.uint8)).view(num_tokens, 3, 1, num_places)


def decode(codec: Codec, bitstream: bytes, frames: torch.Tensor) -> torch.Tensor:
    return codec.decode(bitstream, (len(frames), *frames.shape[2:]))


def require_agreement(codecs: Sequence[AnsCodec | AnsTablesCodec], frames: torch.Tensor) -> bytes:
    """Both write the same, and read it. Return it."""
    first, second = codecs
    bitstream = first.encode(frames)
    assert second.encode(frames) == bitstream
    for codec in codecs:
        assert torch.equal(decode(codec, bitstream, frames), frames)
    return bitstream


@pytest.mark.parametrize("num_tokens", [1, 5, 31, 32, 33, 64, 127, 128, 129, 700, 1024])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
def test_both_coders_and_the_document_agree(num_rows: int, num_tokens: int) -> None:
    frames = coefficients(num_rows, num_tokens)
    bitstream = require_agreement((VECTORS, PORTABLE), frames)
    if num_rows * num_tokens <= 4000:
        rows = frames.reshape(-1, num_tokens).numpy()
        assert np.array_equal(unans(bitstream, *rows.shape), rows)


def test_its_size_is_near_the_entropy() -> None:
    """Of integers whose widths are known, which a decoder must learn."""
    random = np.random.default_rng(1)
    values = np.round(random.normal(0, 3.0, (300, 1024))).astype(np.int64)
    counts = np.bincount((values + 128).reshape(-1), minlength=256) / values.size
    entropy = -(counts[counts > 0] * np.log2(counts[counts > 0])).sum()
    frames = torch.from_numpy((values + 128).astype(np.uint8)).view(100, 3, 1, 1024)
    assert len(VECTORS.encode(frames)) * 8 / values.size < 1.03 * entropy


@pytest.mark.parametrize(("num_tokens", "num_places"), [(1, 1), (5, 7), (33, 20), (64, 100), (1024, 100)])
def test_tables_in_the_bitstream_are_read_alike(num_tokens: int, num_places: int) -> None:
    frames = channels(num_tokens, num_places)
    bitstream = require_agreement((TABLES, PORTABLE_TABLES), frames)
    if frames.numel() <= 20_000:
        rows = unans_tables(bitstream, 3 * num_places, num_tokens)
        assert np.array_equal(rows.T, frames.reshape(num_tokens, -1).numpy())


@pytest.mark.parametrize(
    "integers", [range(100, 120), range(5), range(250, 256), range(90, 130), (0, 255), range(256)], ids=str
)
def test_rows_of_few_and_of_many_integers_are_coded_alike_with_and_without_vectors(integers: Sequence[int]) -> None:
    """The coder holds the entries of 32 neighbouring integers in registers. Rare ones outside are escaped."""
    chance = np.random.default_rng(len(integers))
    values = chance.choice(np.array(integers, np.uint8), (1024 + 70, 3, 1, 4))
    rare = chance.random(values.shape) < 1e-4
    frames = torch.from_numpy(np.where(rare, chance.integers(0, 256, values.shape, np.uint8), values))
    rows = unans_tables(require_agreement((TABLES, PORTABLE_TABLES), frames), 12, len(frames))
    assert np.array_equal(rows.T, frames.reshape(len(frames), -1).numpy())


def test_what_is_broken_in_tables_is_said() -> None:
    frames = channels(8, 1)
    count, size = struct.unpack_from("<BI", good := TABLES.encode(frames))
    slots = np.frombuffer(zstandard.decompress(good[5 : 5 + size]), "<u2").reshape(count, 257)

    def with_slots(changed: np.ndarray, count: int = count) -> bytes:
        header = zstandard.compress(changed.astype("<u2").tobytes())
        return struct.pack("<BI", count, len(header)) + header + good[5 + size :]

    no_escape = np.zeros_like(slots)
    no_escape[:, :2] = SLOTS // 2
    for bad, fault in (
        (with_slots(slots + 1), "do not add up to 1024"),
        (with_slots(no_escape), "without escapes"),
        (with_slots(slots[:0], 0), "has 0 bytes of 0 distributions"),
        (with_slots(np.repeat(slots, 17, 0), 17 * count), f"of {17 * count} distributions"),
    ):
        with pytest.raises(CorruptError, match=fault):
            decode(TABLES, bad, frames)
    with pytest.raises(CorruptError, match="is for 4194305 tokens"):
        TABLES.decode(good, ((1 << 22) + 1, 1, 1))
