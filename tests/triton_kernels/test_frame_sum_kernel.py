"""The frame sum's kernel against its reference, bit for bit."""

from __future__ import annotations

import pytest
import torch

from sgl_kvfetch.codec.layout.frame_sum import sum_of_frames
from sgl_kvfetch.triton_kernels.frame_sum import BLOCK_WORDS, frame_sum, frame_sum_reference
from tests.triton_kernels.cases import DEVICE


def random_frames(num_frames: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randint(0, 256, (num_frames, 3, height, width), generator=generator, dtype=torch.uint8).to(DEVICE)


@pytest.mark.parametrize(
    ("num_frames", "height", "width"),
    [
        (0, 144, 144),
        (1, 8, 8),  # a part of a block
        (1, 144, 144),
        (5, 144, 152),
        (2, 240, 432),
        (3, 128, 128),  # whole blocks
    ],
)
def test_the_references_bits(num_frames: int, height: int, width: int) -> None:
    frames = random_frames(num_frames, height, width)
    found = frame_sum(frames)
    assert (found.dtype, found.shape, found.device) == (torch.int64, (1,), frames.device)
    assert torch.equal(found, frame_sum_reference(frames))
    assert int(found) % 2**64 == sum_of_frames(frames)


def test_extremes() -> None:
    for value in (0, 128, 255):
        frames = torch.full((2, 3, 144, 144), value, dtype=torch.uint8, device=DEVICE)
        assert torch.equal(frame_sum(frames), frame_sum_reference(frames))


def test_nothing_beside_the_frames_is_read() -> None:
    """Frames in the middle of a tensor, with other surroundings."""
    sums = set()
    for value in (0, 0xEE):
        memory = torch.full((5, 3, 144, 144), value, dtype=torch.uint8, device=DEVICE)
        memory[2:4] = random_frames(2, 144, 144)
        sums.add(int(frame_sum(memory[2:4])))
    assert len(sums) == 1


def test_every_part_of_a_block_counts() -> None:
    frames = random_frames(2, 144, 144)
    pixels = frames.view(-1)
    sums = {int(frame_sum(frames))}
    places = [0, 7, 8, 8 * BLOCK_WORDS - 1, 8 * BLOCK_WORDS, pixels.numel() - 1]
    for place in places:
        pixels[place] ^= 0x80
        sums.add(int(frame_sum(frames)))
        pixels[place] ^= 0x80
    assert len(sums) == 1 + len(places)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros((2, 3, 144, 144), dtype=torch.int8), "expected uint8"),
        (torch.zeros((3, 144, 144), dtype=torch.uint8), r"frames are torch.uint8 \(3, 144, 144\)"),
        (torch.zeros((2, 3, 144, 148), dtype=torch.uint8), "multiples of 8"),
        (torch.zeros((2, 3, 148, 144), dtype=torch.uint8), "multiples of 8"),
        (torch.zeros((2, 3, 144, 288), dtype=torch.uint8)[..., :144], "expected contiguous frames"),
    ],
)
def test_other_frames_are_refused(frames: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        frame_sum(frames.to(DEVICE) if frames.is_contiguous() else frames)
