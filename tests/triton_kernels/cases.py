"""Tensors and shapes that the kernels' tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from sgl_kvfetch.triton_kernels import ans, quantise_klt, restore_exact, restore_klt, xxh3

T = TypeVar("T")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, *FP8)
NUM_SLOTS = 1024
_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Shape:
    tokens: int
    layers: int
    heads: int
    dim: int


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer that nobody has written to."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return torch.full((size,), 0xAB, dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def make_buffers(shape: Shape, dtype: torch.dtype) -> list[torch.Tensor]:
    """KV buffers of each layer."""
    return [poisoned(NUM_SLOTS, shape.heads, shape.dim, dtype=dtype) for _ in range(shape.layers)]


def scattered_slots(tokens: int) -> torch.Tensor:
    """Rows in no order, none twice."""
    return torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)


def integer_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size, so that every bit pattern counts."""
    return x.view(_INTEGER_OF_SIZE[x.dtype.itemsize])


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    different = integer_view(found) != integer_view(expected)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} differ, first {first}: {found[first]} != {expected[first]}"
        )


MODULES: tuple[ModuleType, ...] = (ans, quantise_klt, restore_exact, restore_klt, xxh3)


@contextmanager
def replaced_kernels(make: Callable[[Any], T]) -> Iterator[dict[str, T]]:
    """Put what ``make`` makes of each kernel in its place. Wrappers launch it, whatever the device is."""
    made: dict[str, T] = {}
    with ExitStack() as stack:
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                made[name] = make(getattr(module, name))
                stack.enter_context(patch.object(module, name, made[name]))
            if hasattr(module, "use_kernels"):
                stack.enter_context(patch.object(module, "use_kernels", lambda device: True))
        yield made
