"""Makes pictures to decode."""

from __future__ import annotations

import torch

SIZES = {  # number of pictures, height, width
    "smallest": (1, 144, 144),
    "240p": (9, 240, 432),
    "480p": (4, 480, 856),
    "640p": (3, 640, 1136),
    "1080p": (2, 1080, 1920),
}


def make_frames(num_frames: int, height: int, width: int, noise_bits: int = 4) -> torch.Tensor:
    """Return uint8 ``(frames, 3, height, width)`` that vary slowly from picture to picture, as tokens do, with noise
    of ``noise_bits`` bits added. Encoded, a value takes up to a bit more than its noise."""
    generator = torch.Generator().manual_seed(num_frames)
    shape = (num_frames, 3, height, width)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    offset = (rows + columns) // 8 % 128
    drift = torch.arange(num_frames).view(-1, 1, 1, 1)
    noise = torch.randint(0, 1 << noise_bits, shape, generator=generator)
    return (offset + drift + noise).clamp(0, 255).to(torch.uint8)
