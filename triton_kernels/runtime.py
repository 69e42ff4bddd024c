"""Optional access to Triton, and the checks of the kernels' arguments."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sgl_kvfetch.codec import PLANES, TileLayout
from sgl_kvfetch.errors import UnsupportedError

try:
    import triton
    import triton.language as tl
except ImportError:  # the references work without Triton
    triton = tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

# These arguments vary from launch to launch. Specialising on multiples of 16 would recompile, and stall restores.
_VARYING = ("num_tokens", "num_coefficients", "first_frame", "num_frames", "num_vectors")

# Fusing a multiply and an add would round once, where the reference rounds twice.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def jit(function: Any) -> Any:
    """Apply ``triton.jit``. Without Triton, return the function itself, which then must not be called."""
    return function if triton is None else triton.jit(function, do_not_specialize=_VARYING)


def use_kernels(device: torch.device) -> bool:
    """Return whether tensors on this device use the kernels. CPU tensors do so only if Triton interprets.

    Raises UnsupportedError if kernels are needed and Triton is missing.
    """
    if device.type == "cpu":
        return INTERPRETED
    if triton is None:
        raise UnsupportedError(f"tensors on {device} need triton, which is not installed")
    return True


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device. Triton launches there, whichever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def integer_view(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the same size, so that copies preserve every bit pattern."""
    return x.view(_INTEGER_OF_SIZE[x.dtype.itemsize])


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def require_buffers(buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> None:
    """Raise ValueError unless ``buffers`` are the KV buffers of layers, and ``slots`` are rows in them.

    ``buffers``: one or more of ``(num_slots, heads, dim)``, of equal shape, strides, dtype and device, dim contiguous.
    ``slots``: int64 ``(tokens,)``. Their values are only checked on the CPU: on a GPU that would have to wait.
    """
    require(len(buffers) > 0, "no buffers, expected one a layer")
    first = buffers[0]
    require(first.ndim == 3, f"buffer has shape {tuple(first.shape)}, expected (num_slots, heads, dim)")
    require(first.stride(2) == 1, f"buffer has strides {first.stride()}, expected the last to be 1")
    require(first.dtype.itemsize in _INTEGER_OF_SIZE, f"buffers of {first.dtype} are not supported")
    for other in buffers[1:]:
        require(
            (other.shape, other.stride(), other.dtype, other.device)
            == (first.shape, first.stride(), first.dtype, first.device),
            f"buffers differ: {_describe(first)} and {_describe(other)}",
        )
    require(
        slots.ndim == 1 and slots.dtype == torch.int64 and slots.device == first.device,
        f"slots are {_describe(slots)}, expected int64 (tokens,) on {first.device}",
    )
    if slots.device.type == "cpu" and slots.numel():
        top = int(slots.max())
        require(top < first.shape[0], f"slot {top} is outside a buffer of shape {tuple(first.shape)}")


def require_frames(
    frames: Sequence[torch.Tensor],
    layout: TileLayout,
    slots: torch.Tensor,
    outputs: Sequence[torch.Tensor],
    first_frame: int,
    num_planes: int,
) -> None:
    """Raise ValueError unless ``frames`` are ``num_planes`` byte planes, uint8 ``(n, 3, height, width)`` each, of the
    span's frames from ``first_frame`` on. Raise FormatError unless they have room for tokens of the outputs' shape.
    Each frame must be contiguous; the distance between frames may be larger."""
    layout.require_fits((slots.numel(), len(outputs), *outputs[0].shape[1:]))
    require(
        len(frames) == num_planes,
        f"{len(frames)} byte planes of frames, expected {num_planes} for {outputs[0].dtype}",
    )
    plane = (layout.height, layout.width)
    first = frames[0]
    for x in frames:
        require(
            x.ndim == 4 and x.shape[1:] == (PLANES, *plane) and x.dtype == torch.uint8,
            f"frames are {x.dtype} {tuple(x.shape)}, expected uint8 (n, {PLANES}, {plane[0]}, {plane[1]})",
        )
        require(
            x.stride()[1:] == (plane[0] * plane[1], plane[1], 1),
            f"frames have strides {x.stride()}: each of {PLANES}x{plane[0]}x{plane[1]} must be contiguous",
        )
        require(
            x.shape == first.shape and x.stride(0) == first.stride(0),
            f"byte planes differ: frames of shape {tuple(first.shape)} and {tuple(x.shape)}, "
            f"strides {first.stride()} and {x.stride()}",
        )
        require(x.device == slots.device, f"frames are on {x.device}, slots on {slots.device}")
    num_frames = layout.num_frames((slots.numel(),))
    require(
        first_frame >= 0 and first_frame + first.shape[0] <= num_frames,
        f"frames {first_frame} to {first_frame + first.shape[0]}, but {tuple(slots.shape)} tokens fill {num_frames}",
    )


def require_scalable(dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a dtype without scales: fp8 has only 8 bits, and is stored exactly."""
    if dtype not in FLOAT_DTYPES:
        raise UnsupportedError(f"{dtype} has no scales; only the exact quantiser supports it")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"
