"""Compiles kernels for targets, and reads facts from their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from benchmarks.compiled_kernels.variants import all_variants

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
