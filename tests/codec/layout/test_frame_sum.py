"""The frame sum: what it is, bit for bit, and what it finds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sgl_kvfetch.codec.layout import frames as frame_sum
from sgl_kvfetch.codec.layout.frames import GAMMA, MIX_1, MIX_2, sum_of_frames

_MASK = (1 << 64) - 1


def pictures(num_frames: int = 3, height: int = 144, width: int = 152) -> torch.Tensor:
    """Slowly varying, so that neighbouring pixels, rows and frames are often equal."""
    generator = torch.Generator().manual_seed(num_frames)
    noise = torch.randint(0, 3, (num_frames, 3, height, width), generator=generator, dtype=torch.uint8)
    return noise + (torch.arange(width) // 8).to(torch.uint8)


FRAMES = pictures()
SUM = sum_of_frames(FRAMES)


def by_the_book(data: bytes) -> int:
    """docs/format.md, word by word."""
    total = 0
    for j in range(len(data) // 8):
        z = int.from_bytes(data[8 * j :][:8], "little") + (j + 1) * GAMMA & _MASK
        z = (z ^ z >> 30) * MIX_1 & _MASK
        z = (z ^ z >> 27) * MIX_2 & _MASK
        total += z ^ z >> 31
    return total & _MASK


def test_its_bits() -> None:
    assert by_the_book(FRAMES.numpy().tobytes()) == SUM
    # Zeros: the first outputs of SplitMix64 seeded with 0, known answers of many implementations.
    first, second = 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4
    assert sum_of_frames(torch.zeros(8, dtype=torch.uint8)) == first
    assert sum_of_frames(torch.zeros(16, dtype=torch.uint8)) == first + second & _MASK
    assert sum_of_frames(torch.zeros(0, dtype=torch.uint8)) == 0


@pytest.mark.parametrize("block_words", [1, 7, 1000, 1 << 20])
def test_blocks_make_no_difference(block_words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    few = FRAMES[:1, :, :16].contiguous()
    expected = by_the_book(few.numpy().tobytes())
    monkeypatch.setattr(frame_sum, "_BLOCK_WORDS", block_words)
    assert sum_of_frames(few) == expected


def test_frames_that_lie_apart_are_summed_in_their_order() -> None:
    wide = pictures(3, 144, 304)
    assert sum_of_frames(wide[..., 152:]) == sum_of_frames(wide[..., 152:].contiguous())
    assert sum_of_frames(FRAMES.flip(0)) == sum_of_frames(FRAMES.flip(0).contiguous())


def faults(frames: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What decoders and memory get wrong."""
    for value in (0, 128):  # one that repeats the picture before, or was never decoded
        lost = frames.clone()
        lost[-1] = value
        yield f"the last frame is {value}", lost
    repeated = frames.clone()
    repeated[2] = repeated[1]
    yield "a frame twice", repeated
    yield "frames in another order", frames[[1, 0, 2]]
    yield "frames backwards", frames.flip(0)
    yield "planes in another order", frames[:, [1, 0, 2]]
    yield "chroma swapped", frames[:, [0, 2, 1]]
    yield "fewer frames", frames[:-1]
    yield "more frames, of zeros", torch.cat([frames, torch.zeros_like(frames[:1])])
    for shift in (1, 8, 16, 64):
        yield f"moved by {shift}", frames.roll(shift, dims=3)
    yield "a row lower", frames.roll(1, dims=2)
    yield "all brighter", frames + 1
    yield "mirrored", frames.flip(3)


@pytest.mark.parametrize(
    ("frames", "num_faults"), [(FRAMES, 16), (torch.full_like(FRAMES, 128), 4), (torch.zeros_like(FRAMES), 4)]
)
def test_faults_are_found(frames: torch.Tensor, num_faults: int) -> None:
    whole = sum_of_frames(frames)
    num_found = 0
    for fault, wrong in faults(frames):
        if wrong.shape != frames.shape or not torch.equal(wrong, frames):
            assert sum_of_frames(wrong) != whole, fault
            num_found += 1
    assert num_found == num_faults
