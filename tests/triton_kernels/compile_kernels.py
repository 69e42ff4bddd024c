"""Compile what the wrappers launch, for GPUs that need not be there. A script: Triton must not interpret.

Prints one JSON object a line: kernel, capability, and what the assembler says of the machine code.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from sgl_kvfetch.layout.choose import channel_layout, default_layout
from sgl_kvfetch.triton_kernels import frame_sum, pack, restore, restore_klt

CAPABILITIES = (80, 89, 90, 100)
TOKENS, LAYERS, HEADS, DIM, SLOTS = 1000, 3, 8, 128, 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

_POINTER = {
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
}


# What shows in the code that memory is accessed 16 bytes at a time.
WIDE = {"pack": r"ld\.global\.v4\.b32", "restore": r"st\.global\.v4\.b32", "frame": r"ld\.global\.v2\.b64"}


class Recorder:
    """Stands in for a kernel and keeps what it was launched with."""

    def __init__(self, kernel: JITFunction[Any]) -> None:
        self.kernel = kernel
        self.source: ASTSource | None = None
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        names = [p.name for p in self.kernel.params]
        values = {**dict(zip(names, args, strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
        self.options = {k: v for k, v in kwargs.items() if k not in names}
        signature, constants, attributes = {}, {}, {}
        for i, param in enumerate(self.kernel.params):
            value = values[param.name]
            if param.is_constexpr or value is None:
                signature[param.name] = "constexpr"
                constants[(i,)] = value
                continue
            signature[param.name] = _type(value)
            for path, leaf in _leaves(value, (i,)):
                if isinstance(leaf, torch.Tensor) or (
                    isinstance(leaf, int) and leaf % 16 == 0 and not param.do_not_specialize
                ):
                    attributes[path] = [["tt.divisibility", 16]]
        self.source = ASTSource(self.kernel, signature, constants, attributes)


def _type(value: Any) -> Any:
    match value:
        case tuple():
            return tuple(map(_type, value))
        case torch.Tensor():
            return _POINTER[value.dtype]
        case float():
            return "fp32"
        case int():
            return "i32" if value < 2**31 else "i64"
    raise TypeError(type(value))


def _leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    if isinstance(value, tuple):
        for i, x in enumerate(value):
            yield from _leaves(x, (*path, i))
    else:
        yield path, value


@contextmanager
def recording(module: Any, kernel: str) -> Iterator[Recorder]:
    original = getattr(module, kernel)
    recorder = Recorder(original)
    setattr(module, kernel, recorder)
    try:
        yield recorder
    finally:
        setattr(module, kernel, original)


def recorded() -> Iterator[tuple[str, Recorder]]:
    """Every variant, launched by its wrapper on tensors without memory."""
    layout = default_layout(HEADS, DIM, TOKENS)
    slots = torch.empty(TOKENS, dtype=torch.int64, device="meta")
    for dtype in (*FLOATS, torch.float8_e4m3fn):
        buffers = [torch.empty((SLOTS, HEADS, DIM), dtype=dtype, device="meta") for _ in range(LAYERS)]
        name = str(dtype).removeprefix("torch.")
        with recording(pack, "pack_exact_kernel") as recorder:
            packed = pack.pack(buffers, slots, layout)
        yield f"pack-exact-{name}", recorder
        with recording(restore, "restore_exact_kernel") as recorder:
            restore.restore(list(packed.frames), layout, slots, buffers)
        yield f"restore-exact-{name}", recorder
        if dtype == torch.float8_e4m3fn:
            continue
        for scale_over in ("head", "layer"):
            with recording(pack, f"pack_{scale_over}_kernel") as recorder:
                packed = pack.pack(buffers, slots, layout, centres=(127,) * LAYERS, scale_over=scale_over)
            yield f"pack-{scale_over}-{name}", recorder
            with recording(restore, "restore_symmetric_kernel") as recorder:
                restore.restore(
                    list(packed.frames), layout, slots, buffers, scales=packed.scales, centres=(127,) * LAYERS
                )
            yield f"restore-{scale_over}-{name}", recorder


def recorded_klt() -> Iterator[tuple[str, Recorder]]:
    """``restore_klt`` for each dtype and rotation, and with heads that are no power of two, or large."""
    variants = [(dtype, DIM, "neox") for dtype in FLOATS]
    variants += [
        (torch.bfloat16, dim, kind) for dim, kind in ((DIM, "none"), (DIM, "gptj"), (80, "neox"), (256, "neox"))
    ]
    for dtype, dim, kind in variants:
        layout = channel_layout(HEADS, dim, TOKENS, "1080p")
        frames = torch.empty(
            (layout.num_frames(TOKENS), 3, layout.height, layout.width), dtype=torch.uint8, device="meta"
        )
        outputs = [torch.empty((SLOTS, HEADS, dim), dtype=dtype, device="meta") for _ in range(LAYERS)]
        rotation = torch.empty((TOKENS, dim), dtype=torch.float32, device="meta")
        with recording(restore_klt, "restore_klt_kernel") as recorder:
            restore_klt.restore_klt(
                frames,
                layout,
                torch.empty(TOKENS, dtype=torch.int64, device="meta"),
                outputs,
                scales=torch.empty((TOKENS, LAYERS, 1), dtype=torch.bfloat16, device="meta"),
                inverse=torch.empty((LAYERS, HEADS // 2, 2 * dim, 2 * dim), dtype=torch.bfloat16, device="meta"),
                step=0.25,
                means=torch.empty((LAYERS, HEADS, dim), dtype=torch.float32, device="meta"),
                rotation=None if kind == "none" else rotation,
                interleaved=kind == "gptj",
            )
        yield f"restore-klt-{kind}-{dim}-{str(dtype).removeprefix('torch.')}", recorder


def recorded_frame_sum() -> Iterator[tuple[str, Recorder]]:
    frames = torch.empty((4, 3, 480, 856), dtype=torch.uint8, device="meta")
    with recording(frame_sum, "frame_sum_kernel") as recorder:
        frame_sum.frame_sum(frames)
    yield "frame-sum", recorder


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of the stack that they spill to."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {key.lower(): int(re.search(rf"{key}:(\d+)", text)[1]) for key in ("REG", "STACK")}  # type: ignore[index]


def main() -> None:
    assert not triton.knobs.runtime.interpret
    for name, recorder in (*recorded(), *recorded_klt(), *recorded_frame_sum()):
        assert recorder.source is not None, f"{name} was not launched"
        for capability in CAPABILITIES:
            target = GPUTarget("cuda", capability, 32)
            compiled = triton.compile(recorder.source, target=target, options=recorder.options)
            cubin = compiled.asm["cubin"]
            result = {
                "kernel": name,
                "capability": capability,
                "cubin_bytes": len(cubin),
                "wide": bool(re.search(WIDE[name.split("-")[0]], compiled.asm["ptx"])),
                "shared_bytes": compiled.metadata.shared,
                **usage(cubin),
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
