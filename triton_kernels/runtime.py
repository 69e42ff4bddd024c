"""Optional access to Triton, and what several kernels share: checks of their arguments, and device functions.

A kernel here is a module with a wrapper, which checks its arguments; the kernel; and a reference in torch, which CPU
tensors use, and which the tests compare with. What must hold for each:

* **The host never waits.** A wrapper launches on the current stream and returns. So it cannot raise errors that only
  the device detects. Broken bitstreams, and values that are not finite, are reported in a returned tensor.
* **Nothing is compiled while requests are served.** Triton compiles again for each new kind of argument, and treats
  integers that are 1, or multiples of 16, as kinds of their own. So what varies from launch to launch is not
  specialised (`_VARYING`), and what this server itself writes is compiled at the start.
  tests/triton_kernels/specialisations.py finds kinds that were missed.
* **Bytes from a store decide no address.** They may be anything. Reads are masked by the sizes of what was passed, and
  writes by slots and shapes; a loop's length never depends on them.
* **The bits are the CPU's**, on every device, except where a matrix product adds in an order of its own. So products
  and sums are not fused (`COMPILE_OPTIONS`), and roundings are to nearest in the interpreter, too (`round_float32`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sgl_kvfetch.errors import UnsupportedError

try:
    import triton
    import triton.language as tl
except ImportError:  # the references work without Triton
    triton = tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)


def _interpret_one_at_a_time() -> None:
    """Let a thread wait until others' kernels have ended, SGLang's too. The interpreter keeps a launch's grid, and what
    it puts in the place of triton.language, in globals: two at once would compute with each other's."""
    from triton.runtime.interpreter import GridExecutor

    lock = threading.RLock()
    interpret = GridExecutor.__call__

    @functools.wraps(interpret)
    def interpret_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with lock:
            interpret(self, *args, **kwargs)

    GridExecutor.__call__ = interpret_alone


if INTERPRETED:
    _interpret_one_at_a_time()

FP8_MANTISSA = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}  # bits
# What kernels have in memory: fp8 as bytes, which they convert themselves. Older GPUs have no fp8, nor has the
# interpreter a cast that rounds to it.
STORED = (
    {}
    if triton is None
    else {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    | dict.fromkeys(FP8_MANTISSA, tl.uint8)
)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *FP8_MANTISSA)

# These arguments vary from launch to launch. Specialising on multiples of 16 would recompile, and stall restores.
_VARYING = (
    "num_tokens",
    "num_groups",
    "num_blocks",
    "most_exact",
    "most_heads",
    "page_size",
    "num_slots",
    "num_sinks",
    "num_norms",
    "num_channels",
    "first_cell",
    "first_head",
    "first_norm",
    "first_channel",
)
# A view of a larger tensor, which may begin anywhere: with pages of one token, at every multiple of 8 bytes.
_UNALIGNED = ("p_slots",)

# Fusing a multiply and an add would round once, where the reference rounds twice.
COMPILE_OPTIONS: dict[str, Any] = {"enable_fp_fusion": False}


def jit(function: Any) -> Any:
    """Apply ``triton.jit``. Without Triton, return the function itself, which then must not be called."""
    if triton is None:
        return function
    return triton.jit(function, do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)


def use_kernels(device: torch.device) -> bool:
    """Return whether tensors on this device use the kernels. CPU tensors do so only with Triton's interpreter.

    Raises UnsupportedError if kernels are needed and Triton is missing.
    """
    if device.type == "cpu":
        return INTERPRETED
    if triton is None:
        raise UnsupportedError(f"tensors on {device} need triton, which is not installed")
    return True


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make this the current device: Triton launches there, whichever device the arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def table_on(rows: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return rows of numbers as int64 on the device, without waiting for it."""
    return uploaded(torch.tensor(rows, dtype=torch.int64), device)


def uploaded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the host to the device, on the current stream, without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def require(condition: bool, message: Callable[[], str]) -> None:
    """Raise ValueError unless ``condition``. ``message`` is called only then: making it takes longer than a launch."""
    if not condition:
        raise ValueError(message())


def require_buffers(buffers: Sequence[torch.Tensor], slots: torch.Tensor | None = None) -> None:
    """Raise ValueError unless ``buffers`` are the KV buffers of layers, and ``slots``, if given, are rows in them.

    ``buffers``: one or more of ``(num_slots, heads, dim)``, of equal shape, strides, dtype and device, dim contiguous.
    ``slots``: int64 ``(tokens,)``. Their values are only checked on the CPU: on a GPU that would have to wait.
    """
    require(len(buffers) > 0, lambda: "no buffers, expected one a layer")
    first = buffers[0]
    require(first.ndim == 3, lambda: f"buffer has shape {tuple(first.shape)}, expected (num_slots, heads, dim)")
    require(first.stride(2) == 1, lambda: f"buffer has strides {first.stride()}, expected the last to be 1")
    kinds = [(x.shape, x.stride(), x.dtype, x.device) for x in buffers]
    require(kinds.count(kinds[0]) == len(kinds), lambda: f"buffers differ: {', '.join(map(_describe, buffers))}")
    if slots is None:
        return
    require(
        slots.ndim == 1 and slots.dtype == torch.int64 and slots.device == first.device,
        lambda: f"slots are {_describe(slots)}, expected int64 (tokens,) on {first.device}",
    )
    if slots.device.type == "cpu" and slots.numel():
        top = int(slots.max())
        require(top < first.shape[0], lambda: f"slot {top} is outside a buffer of shape {tuple(first.shape)}")


def require_scalable(dtype: torch.dtype) -> None:
    """Raise UnsupportedError for a dtype that kernels do not know."""
    if dtype not in FLOAT_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in FLOAT_DTYPES)
        raise UnsupportedError(f"kernels of 'klt' have no {dtype}: expected {names}")


def _describe(x: torch.Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)} with strides {x.stride()} on {x.device}"


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


if triton is not None:
    TRUNCATES = tl.constexpr(INTERPRETED)
INTEGERS = {} if triton is None else {1: tl.int8, 2: tl.int16, 4: tl.int32}  # by bytes


@jit
def round_float32(b_x, dtype: tl.constexpr):
    """Round to the nearest value of ``dtype``, ties to even. A GPU's cast does that in an instruction for two values;
    Triton's interpreter truncates to bfloat16."""
    if dtype == tl.bfloat16 and TRUNCATES:
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_bits = (b_bits + 0x7FFF + ((b_bits >> 16) & 1)) >> 16
        b_bits = tl.where(b_x == b_x, b_bits, 0x7FC0)
        return b_bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return b_x.to(dtype)


@jit
def stored_values(b_x, dtype: tl.constexpr, MANTISSA: tl.constexpr):
    """Return float32 as it is stored in ``dtype``; or in fp8, within whose finite range it must be. ``MANTISSA``: the
    bits of a mantissa in fp8; 0 for other dtypes."""
    if MANTISSA == 0:
        return round_float32(b_x, dtype)
    else:
        SHIFT: tl.constexpr = 23 - MANTISSA
        BIAS: tl.constexpr = 2 ** (6 - MANTISSA) - 1
        b_bits = b_x.to(tl.int32, bitcast=True)
        b_rest = b_bits & 0x7FFFFFFF
        # Adding this rounds to what is a step below the smallest normal number, and leaves the number of steps in the
        # lowest bits.
        TO_STEPS: tl.constexpr = 1.5 * 2.0 ** (24 - BIAS - MANTISSA)
        ITS_BITS: tl.constexpr = ((127 + 24 - BIAS - MANTISSA) << 23) | 0x400000
        b_steps = (b_rest.to(tl.float32, bitcast=True) + TO_STEPS).to(tl.int32, bitcast=True) - ITS_BITS
        b_normal = (b_rest + ((1 << (SHIFT - 1)) - 1) + ((b_rest >> SHIFT) & 1)) >> SHIFT
        b_normal -= (127 - BIAS) << MANTISSA
        b_fp8 = tl.where(b_rest < (128 - BIAS) << 23, b_steps, b_normal)
        return (b_fp8 | ((b_bits >> 24) & 0x80)).to(tl.uint8)


@jit
def load_values(p_x, m_x, MANTISSA: tl.constexpr):
    """Load what `stored_values` has made, as float32; 0 where ``m_x`` is not. In fp8, infinity becomes NaN."""
    if MANTISSA == 0:
        return tl.load(p_x, mask=m_x, other=0.0).to(tl.float32)
    else:
        SHIFT: tl.constexpr = 23 - MANTISSA
        BIAS: tl.constexpr = 2 ** (6 - MANTISSA) - 1
        b_bits = tl.load(p_x, mask=m_x, other=0).to(tl.int32)
        b_rest = b_bits & 0x7F
        b_normal = ((b_rest << SHIFT) + ((127 - BIAS) << 23)).to(tl.float32, bitcast=True)
        b_x = tl.where(b_rest < (1 << MANTISSA), b_rest.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA), b_normal)
        b_x = tl.where(b_rest >= (0x7F if MANTISSA == 3 else 0x7C), float("nan"), b_x)
        return tl.where(b_bits >= 0x80, -b_x, b_x)


@jit
def slots_of(p_row, p_slots, num_slots, o_token, m_token, page_size, F: tl.constexpr):
    """Return the slots of a cell's tokens by the page table that its row names; -1 for those that are left out, or
    behind the last slot: memory there is another request's."""
    p_pages = tl.load(p_row + F.pages).to(tl.pointer_type(tl.int32))
    b_page = tl.load(p_pages + o_token // page_size, mask=m_token, other=-1).to(tl.int64)
    b_which = b_page * page_size + o_token % page_size
    return tl.load(p_slots + b_which, mask=(b_page >= 0) & (b_which < num_slots), other=-1)


def require_tensor(name: str, x: torch.Tensor, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> None:
    """Raise ValueError unless ``x`` is a contiguous tensor of this kind."""
    require(
        x.shape == shape and x.dtype == dtype and x.device == device and x.is_contiguous(),
        lambda: f"{name}: {_describe(x)}, expected contiguous {dtype} {shape} on {device}",
    )
