"""Makes the wrappers of our kernels launch PTX in the emulator, on CPU tensors: see `harness.ptx`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from torch.overrides import TorchFunctionMode

from benchmarks.compiled_kernels.machine_code import gpu_target
from benchmarks.compiled_kernels.recorder import Recorder
from harness.ptx.block import Kernel
from harness.ptx.global_memory import GlobalMemory
from tests.triton_kernels.cases import replaced_kernels

# For kernels without machine code. Read once: who sets a knob changes the environment.
_CACHE = f"{triton.knobs.cache.dir}/ptx"


class Addressed(TorchFunctionMode):
    """Notes tensors whose address was asked for: kernels may reach them through tables."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.data_ptr:
            self.tensors.append(args[0])
        return function(*args, **(kwargs or {}))


class Emulator:
    """``kernels``: those that were compiled, by their names and what they were compiled for."""

    def __init__(self, target: str) -> None:
        """``target``: such as ``sm_90``."""
        self.target = target
        self.kernels: dict[str, Kernel] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make all wrappers launch here."""
        with Addressed() as addressed, replaced_kernels(lambda kernel: _Launcher(kernel, self, addressed)):
            yield

    def compiled(self, recorder: Recorder) -> Kernel:
        """Return the kernel for a launch that was recorded."""
        assert recorder.source is not None
        key = f"{recorder.kernel.__name__} {recorder.source.hash()} {recorder.options}"
        if key not in self.kernels:
            with _without_machine_code():
                found = triton.compile(recorder.source, target=gpu_target(self.target), options=recorder.options)
            self.kernels[key] = Kernel(found.asm["ptx"], found.metadata.shared)
        return self.kernels[key]


@contextmanager
def _without_machine_code() -> Iterator[None]:
    """Have Triton compile as far as PTX. `ptxas` takes longer than all before, and `test_compiled_kernels` runs it."""

    def leave_out(backend: Any = None, stages: Any = None, *_: Any) -> tuple[str, str]:
        if stages is not None:
            stages["cubin"] = lambda ptx, metadata: b""
        return "", ""  # without arguments, newer Tritons ask for a part of the cache's key

    knobs = triton.knobs
    with (
        patch.object(knobs.runtime, "add_stages_inspection_hook", leave_out),
        patch.object(knobs.cache, "dir", _CACHE),
    ):
        yield


class _Launcher(Recorder):
    """Replaces a kernel, and runs its launches."""

    def __init__(self, kernel: Any, emulator: Emulator, addressed: Addressed) -> None:
        super().__init__(kernel)
        self._emulator, self._addressed = emulator, addressed
        self._grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> _Launcher:
        self._grid = grid
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        reachable = list(self._addressed.tensors)
        super().__call__(*args, **kwargs)
        memory = GlobalMemory()
        for tensor in [*(x for x in self.arguments if isinstance(x, torch.Tensor)), *reachable]:
            memory.add(tensor, self.kernel.__name__)
        self._emulator.compiled(self).launch(self._grid[0], list(map(_number_of, self.arguments)), memory)


def _number_of(argument: Any) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return int(np.float32(argument).view(np.uint32)) if isinstance(argument, float) else int(argument)
