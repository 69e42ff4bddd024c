"""Compiles kernels for targets, and reads facts from their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.compiled_kernels.recorder import recording
from benchmarks.compiled_kernels.variants import all_variants
from benchmarks.gpu_model import RESTORE_COEFFICIENTS, RestoreProgram
from harness.ptx.block import Kernel
from harness.ptx.global_memory import GlobalMemory
from sgl_kvfetch.triton_kernels import restore_klt
from sgl_kvfetch.triton_kernels.klt_choice import made_up_cell
from sgl_kvfetch.triton_kernels.restore_klt import COEFFICIENTS, KltOptions

TARGETS = ("sm_80", "sm_89", "sm_90", "sm_100", "gfx942")

_PTX_ACCESS = r"\b{}\.global(?:\.[a-zL][\w:]*)*?(?:\.v(\d))?\.b(8|16|32|64)\b"
_AMD_ACCESS = r"\b(?:global|buffer|flat)_{}_(?:dword(?:x(\d))?|u?(short|byte)\w*)\b"
_PTX_MATRIX = r"\b(?:(mma\.sync|wgmma\.mma_async)\S*\.(m\d+)(?:n\d+)(k\d+)|(tcgen05\.mma))\b"
_SASS_MATRIX = r"\b(?:HMMA|HGMMA|UTCHMMA)\b"
_AMD_MATRIX = r"\bv_(mfma_f32_\d+x\d+x\d+)_?\w*"


@dataclass(frozen=True)
class Facts:
    """
    Attributes:
        registers: Registers per thread.
        shared_bytes: Shared memory per program.
        stack_bytes: Stack per thread, which spilled registers use.
        access_bytes: The widest store to a KV buffer; for ``xxh3``, the widest load of frames.
        instructions: The instructions that multiply matrices, without their number of columns.
        loop: The instructions of a warp in the innermost loop that has some of these, and how many these are; on
            NVIDIA only.
    """

    kernel: str
    target: str
    registers: int
    shared_bytes: int
    stack_bytes: int
    access_bytes: int
    instructions: tuple[str, ...]
    loop: tuple[int, int] | None


def compile_all(targets: Sequence[str] = TARGETS) -> Iterator[Facts]:
    """Compile every variant for every target. If one does not compile, Triton's exception is raised."""
    assert not triton.knobs.runtime.interpret, "Triton interprets"
    for target in targets:
        for variant in all_variants():
            recorder = variant.record()
            assert recorder.source is not None, f"{variant.name} was not launched"
            compiled = triton.compile(recorder.source, target=gpu_target(target), options=recorder.options)
            is_amd = target.startswith("gfx")
            text = compiled.asm["amdgcn" if is_amd else "ptx"]
            registers, stack_bytes = _amd_usage(text) if is_amd else _cuda_usage(compiled.asm["cubin"])
            instructions = matrix_instructions(text)
            yield Facts(
                variant.name,
                target,
                registers,
                compiled.metadata.shared,
                stack_bytes,
                (amd_access_bytes if is_amd else ptx_access_bytes)(text, variant.access),
                instructions,
                matrix_loop(_dump(compiled.asm["cubin"], "-sass")) if instructions and not is_amd else None,
            )


def restore_program(options: KltOptions) -> RestoreProgram:
    """Return what a program of `restore_klt` takes on compute capability 9.0, with NeoX's rotation. Instructions are
    counted in the machine code, half of which outside the loop is for K, and half for V. Cycles of shared memory are
    counted in the emulator, of a program that restores K."""
    steps = -(-RESTORE_COEFFICIENTS // COEFFICIENTS)
    compiled, two = _emulated(options, 2 * COEFFICIENTS)
    _, four = _emulated(options, 4 * COEFFICIENTS)
    registers, stack_bytes = _cuda_usage(compiled.asm["cubin"])
    sass = _dump(compiled.asm["cubin"], "-sass")
    loop = matrix_loop(sass)
    assert loop is not None
    return RestoreProgram(
        tokens=options.tokens,
        warps=options.launch["num_warps"],
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=compiled.metadata.shared,
        loop=loop[0],
        instructions=loop[0] * steps + (len(_instructions(sass)) - loop[0]) // 2,
        shared_cycles=two + (four - two) * (steps - 2) // 2,
    )


def _emulated(options: KltOptions, coefficients: int) -> tuple[Any, int]:
    """Return the kernel of a cell that one program restores, and the cycles of shared memory that it takes."""
    buffer = torch.empty((1, 8, 128), dtype=torch.bfloat16, device="meta")[:, :2]
    shape = restore_klt.klt_shape(buffer, buffer, 3, 128)
    cell = made_up_cell(shape, buffer.dtype, coefficients, options.tokens, torch.device("cpu"))
    table, slots = torch.frombuffer(bytearray(cell.row()), dtype=torch.uint8), torch.arange(options.tokens)
    with recording(restore_klt, "restore_klt_kernel") as recorder:
        restore_klt.launch_klt(
            shape, buffer.dtype, restore_klt.VECTORS[0], options, table, slots, 1, options.tokens, cell.num_exact
        )
    compiled: Any = triton.compile(recorder.source, target=gpu_target("sm_90"), options=recorder.options)
    memory, model = GlobalMemory(), cell.model
    assert cell.rotations is not None
    own = model.matrix, model.mean, model.scales, *model.k, *model.v, cell.integers, cell.rotations, cell.data
    for tensor in (table, slots, *own):
        memory.add(tensor, "restore_klt")
    numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else int(x) for x in recorder.arguments]
    return compiled, Kernel(compiled.asm["ptx"], compiled.metadata.shared).launch(1, numbers, memory)


def ptx_access_bytes(ptx: str, access: str) -> int:
    pattern = _PTX_ACCESS.format({"load": "ld", "store": "st"}[access])
    return max((int(width or 1) * int(bits) // 8 for width, bits in re.findall(pattern, ptx)), default=0)


def amd_access_bytes(amdgcn: str, access: str) -> int:
    found = re.findall(_AMD_ACCESS.format(access), amdgcn)
    return max(({"byte": 1, "short": 2}.get(narrow) or 4 * int(width or 1) for width, narrow in found), default=0)


def matrix_instructions(text: str) -> tuple[str, ...]:
    """Return the matrix instructions. They determine the order of additions; the number of columns is left out."""
    of_nvidia = {" ".join(filter(None, groups)) for groups in re.findall(_PTX_MATRIX, text)}
    return tuple(sorted(of_nvidia | set(re.findall(_AMD_MATRIX, text))))


def matrix_loop(sass: str) -> tuple[int, int] | None:
    """Return the instructions of the shortest loop that multiplies matrices, and how many of them do."""
    code, found = _instructions(sass), []
    for at, text in code.items():
        branch = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        if branch and int(branch[1], 16) < at:
            loop = [x for i, x in code.items() if int(branch[1], 16) <= i <= at]
            found.append((len(loop), sum(bool(re.search(_SASS_MATRIX, x)) for x in loop)))
    return min((x for x in found if x[1]), default=None)


def _instructions(sass: str) -> dict[int, str]:
    """Return instructions by their addresses."""
    return {int(at, 16): text for at, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", sass)}


def gpu_target(target: str) -> GPUTarget:
    if target.startswith("gfx"):
        return GPUTarget("hip", target, 64)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def _cuda_usage(cubin: bytes) -> tuple[int, int]:
    """Return registers and stack bytes, as cuobjdump reports them."""
    text = _dump(cubin, "-res-usage")
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _dump(cubin: bytes, option: str) -> str:
    """Return what cuobjdump prints of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _amd_usage(amdgcn: str) -> tuple[int, int]:
    """Return vector registers, including accumulators, and bytes of scratch memory."""
    return _number(r"\.vgpr_count:\s*(\d+)", amdgcn), _number(r"\.private_segment_fixed_size:\s*(\d+)", amdgcn)


def _number(pattern: str, text: str) -> int:
    found: Any = re.search(pattern, text)
    return int(found[1])
