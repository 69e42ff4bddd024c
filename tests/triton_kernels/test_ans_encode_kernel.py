"""The kernel that encodes `ans`, beside the native coder, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream.ans import ESCAPE, SLOTS, AnsCodec, encoding_tables, least_sums, tables
from sgl_kvfetch.triton_kernels.ans import ALIGNMENT, AnsChunk
from sgl_kvfetch.triton_kernels.ans_encode import MAX_TOKENS, ans_encode, ans_encode_reference
from tests.codec.bitstream.test_ans import coefficients
from tests.triton_kernels.cases import DEVICE, poisoned

CODEC = AnsCodec()
MARGIN = 12  # bytes between the rooms, which nobody may write to


def joined(every: Sequence[torch.Tensor], rooms: Sequence[int]) -> tuple[torch.Tensor, list[AnsChunk], torch.Tensor]:
    """Return all frames one behind the other, chunks with these rooms, and poisoned memory for bitstreams."""
    chunks, start, out_start = [], MARGIN, 0
    for frames, room in zip(every, rooms, strict=True):
        chunks.append(AnsChunk(start, room, len(frames), frames.shape[3], out_start))
        start += -(-(room + MARGIN) // ALIGNMENT) * ALIGNMENT
        out_start += frames.numel()
    return torch.cat([x.flatten() for x in every]).to(DEVICE), chunks, poisoned(start, dtype=torch.uint8)


def most_bytes(frames: torch.Tensor) -> int:
    return 3 * (frames.numel() + 3 * len(frames)) + 4 * 32


def assert_as_native(every: Sequence[torch.Tensor], rooms: Sequence[int]) -> None:
    """Both the kernel and the reference: the native encoder's bytes at the ends of the rooms; elsewhere, nothing."""
    expected = [CODEC.encode(x) for x in every]
    for encode in (ans_encode, ans_encode_reference):
        frames, chunks, data = joined(every, rooms)
        sizes = encode(frames, chunks, data)
        assert (sizes.dtype, sizes.device) == (torch.int32, data.device)
        assert sizes.tolist() == [len(x) for x in expected]
        for chunk, bitstream in zip(chunks, expected, strict=True):
            end, is_room = chunk.start + chunk.size, len(bitstream) <= chunk.size
            assert not is_room or bytes(data[end - len(bitstream) : end].tolist()) == bitstream
            data[end - (len(bitstream) if is_room else chunk.size) : end] = 0xAB
        assert bool((data == 0xAB).all())


def test_the_native_encoders_bytes_at_any_number_of_tokens() -> None:
    """Chunks of different shapes in one launch, with escaped integers."""
    every = [coefficients(3, tokens) for tokens in (1, 2, 5, 31, 32, 33, 63, 64, 95, 200)]
    every += [coefficients(6, 33), coefficients(33, 9)]
    assert sum(int((x == 0).sum()) for x in every)  # in narrow rows no distribution has 0
    assert_as_native(every, [most_bytes(x) for x in every])


def test_integers_that_no_model_expects() -> None:
    """Noise, in which most integers are escaped in narrow rows and classes jump; and the extremes."""
    random = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (3, 3, 1, 40), dtype=torch.uint8, generator=random)
    noise[::2] = 128
    noise[0, 1, 0, 3:9] = 255
    jumps = torch.full((4, 3, 1, 33), 128, dtype=torch.uint8)
    jumps[:, 1] = 0
    every = [noise, jumps, *(torch.full((1, 3, 1, 33), value, dtype=torch.uint8) for value in (0, 128, 255))]
    every += [torch.randint(0, 256, (4, 3, 1, 70), dtype=torch.uint8, generator=random)]
    classes = np.diff([0, 52] * 2)  # as those of `jumps`: no distribution has such a step
    assert not tables().slots[17, 128 + classes].all()
    assert_as_native(every, [most_bytes(x) for x in every])


def test_rows_at_the_edges_of_classes() -> None:
    """Each class's least sum of magnitudes, and one less."""
    tokens = 33  # one more than a warp has lanes
    totals = sorted({total - below for total in least_sums(tokens) for below in (0, 1) if total <= 128 * tokens})
    assert len(totals) > 60
    magnitudes = np.array([[total // tokens + (i < total % tokens) for i in range(tokens)] for total in totals])
    integers = torch.from_numpy((128 - magnitudes).astype(np.uint8))
    integers = torch.cat([integers, integers[: -len(totals) % 3]]).view(-1, 3, 1, tokens)
    assert_as_native([integers], [most_bytes(integers)])


@pytest.mark.parametrize("tokens", [3, 33])
def test_too_little_room_is_reported_and_nothing_else_is_written(tokens: int) -> None:
    frames = coefficients(3, tokens, seed=5)
    frames[0, 1, 0, ::2] = 255 - frames[0, 0, 0, ::2]  # escaped integers
    size = len(CODEC.encode(frames))
    rooms = sorted({0, 1, 2, 3, 4 * min(tokens, 32), size // 2, size - 5, *range(size - 3, size + 3)})
    assert_as_native([frames] * len(rooms), rooms)


def test_reciprocals_divide_every_state() -> None:
    """All multiples of a frequency and the states before them, at both ends and at random."""
    found = encoding_tables()
    entries, reciprocals = (x.numpy().view(np.uint32).astype(np.uint64) for x in (found.entries, found.reciprocals))
    assert entries.shape == reciprocals.shape == (len(tables().slots), ESCAPE)
    counts, which = np.unique(entries >> 10 & SLOTS - 1, return_index=True)
    assert counts[0] == 1
    assert counts[-1] > 512
    random = np.random.default_rng(0)
    quotients = np.concatenate([np.arange(300), 2**22 - 1 - np.arange(300), random.integers(0, 2**22, 5000)])
    for count, i in zip(counts.tolist(), which, strict=True):
        entry, reciprocal = entries.flat[i], reciprocals.flat[i]
        states = np.concatenate([quotients * count, quotients * count + count - 1]).astype(np.uint64)
        divided = (states + (entry >> 24 & 1)) * reciprocal >> (32 + (entry >> 20 & 15))
        assert np.array_equal(divided, states // count)


def test_no_chunks() -> None:
    nothing = torch.zeros(0, dtype=torch.uint8, device=DEVICE)
    assert ans_encode(nothing, [], nothing).numel() == 0


@pytest.mark.parametrize(
    ("frames", "data", "chunk", "message"),
    [
        (torch.zeros(64, dtype=torch.int8), torch.zeros(64, dtype=torch.uint8), (0, 64, 1, 4, 0), "out is torch.int8"),
        (torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.int8), (0, 64, 1, 4, 0), "data is torch.int8"),
        (torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), (4, 64, 1, 4, 0), "exceeds 64 bytes"),
        (torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), (0, 64, 1, 22, 0), "64 of output"),
        (torch.zeros(1 << 24, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8), (0, 64, 1, MAX_TOKENS + 1, 0),
         "more than 4194304 tokens"),
    ],
)  # fmt: skip
def test_other_arguments_are_refused(
    frames: torch.Tensor, data: torch.Tensor, chunk: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ans_encode(frames, [AnsChunk(*chunk)], data)
