"""frame_sum: a checksum of decoded frames on their device. It reads them once; only eight bytes go to the host."""

from __future__ import annotations

import torch

from sgl_kvfetch.codec.layout import GAMMA, MIX_1, MIX_2, WORD_BYTES, sum_of_frames
from sgl_kvfetch.triton_kernels.runtime import COMPILE_OPTIONS, jit, on_device, require, tl, triton, use_kernels

BLOCK_WORDS = 2048
NUM_WARPS = 4
_VECTOR_WORDS = 2  # a load of 16 bytes


def frame_sum(frames: torch.Tensor) -> torch.Tensor:
    """Return the frame sum (``codec/layout/frame_sum.py``) as a signed number, int64 ``(1,)`` on the frames' device.

    This does not wait for the device. CPU tensors use the reference, unless Triton interprets. All others use the
    kernel, on the current stream.

    Args:
        frames: uint8 ``(frames, 3, height, width)``, contiguous, height and width multiples of 8, at an address that
            is a multiple of 16.

    Raises:
        ValueError: the frames have another dtype, shape or strides.
        UnsupportedError: a GPU without Triton.
    """
    shape = tuple(frames.shape)
    require(
        frames.dtype == torch.uint8 and frames.ndim == 4 and not (shape[2] % WORD_BYTES or shape[3] % WORD_BYTES),
        lambda: (
            f"frames are {frames.dtype} {shape}, expected uint8 (frames, 3, height, width) with sides in multiples of 8"
        ),
    )
    require(
        frames.is_contiguous(), lambda: f"frames {shape} have strides {frames.stride()}, expected contiguous frames"
    )
    return _launch(frames) if use_kernels(frames.device) else frame_sum_reference(frames)


def frame_sum_reference(frames: torch.Tensor) -> torch.Tensor:
    """Compute ``frame_sum`` on the CPU, for frames from any device. Same arguments."""
    found = sum_of_frames(frames)
    return torch.tensor([found - (1 << 64) if found >> 63 else found], device=frames.device)


def _launch(frames: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(1, dtype=torch.int64, device=frames.device)
    words = frames.view(-1).view(torch.int64)
    if not words.numel():
        return total
    grid = (triton.cdiv(words.numel(), BLOCK_WORDS),)
    constants = {"GAMMA": GAMMA, "MIX_1": MIX_1, "MIX_2": MIX_2, "VECTOR": _VECTOR_WORDS, "BLOCK": BLOCK_WORDS}
    options = {"num_warps": NUM_WARPS, **COMPILE_OPTIONS}
    with on_device(frames.device):
        frame_sum_kernel[grid](words, total, words.numel() // _VECTOR_WORDS, **constants, **options)
    return total


@jit
def frame_sum_kernel(
    p_words,  # (words,)
    p_total,  # (1,), initially zero
    num_vectors,
    GAMMA: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Words are counted in whole vectors of VECTOR, so that the compiler can load vectors. Programs may add to the
    total in any order: integer addition gives the same bits."""
    o_word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_word = o_word < num_vectors.to(tl.int64) * VECTOR
    b_word = tl.load(p_words + o_word, mask=m_word, other=0).to(tl.uint64, bitcast=True)
    b_word += (o_word + 1).to(tl.uint64) * GAMMA
    b_word = (b_word ^ (b_word >> 30)) * MIX_1
    b_word = (b_word ^ (b_word >> 27)) * MIX_2
    b_word = b_word ^ (b_word >> 31)
    b_word = tl.where(m_word, b_word.to(tl.int64, bitcast=True), 0)
    tl.atomic_add(p_total, tl.sum(b_word, axis=0), sem="relaxed")
