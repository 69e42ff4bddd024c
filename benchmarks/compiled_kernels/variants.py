"""The kernel variants to compile. Each is launched by its wrapper on tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Literal

import torch

from benchmarks.compiled_kernels.recorder import Recorder, recording
from sgl_kvfetch.codec.quant.klt import KltForward
from sgl_kvfetch.triton_kernels import ans, quantise_klt, restore_exact, restore_klt, xxh3

TOKENS, SLOTS, LAYERS = 1000, 4096, 3
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """One launch of a kernel.

    ``access``: which width to report: that of stores to KV buffers or rows, or for ``xxh3`` that of loads of frames.
    """

    name: str
    module: ModuleType
    kernel: str
    launch: Callable[[], object]
    access: Literal["load", "store"] = "store"

    def record(self) -> Recorder:
        names = [name for name in vars(self.module) if name.endswith("_kernel")]
        with ExitStack() as stack:
            recorders = {name: stack.enter_context(recording(self.module, name)) for name in names}
            self.launch()
        return recorders[self.kernel]


def all_variants() -> Iterator[Variant]:
    for dtype in FLOATS:
        yield _restore_klt(dtype, 2, 128, "rotated")
        yield _restore_klt(dtype, 2, 128, "interleaved")
    for dtype in FP8:
        yield _restore_klt(dtype, 2, 128, "rotated")
    yield _restore_klt(_BF16, 2, 128, "mixed")
    for heads, dim in ((3, 64), (2, 128), (2, 80), (2, 256)):
        yield _restore_klt(_BF16, heads, dim, "")
        if dim != 128:
            yield _restore_klt(_BF16, heads, dim, "rotated")
    for dtype in (*FLOATS, FP8[0]):  # both are bytes
        yield _restore_klt(dtype, 2, 128, "", "exact_tokens")
    for dtype in (*FLOATS, *FP8):
        yield _quantise_klt(dtype, rotary_dim=128)
    yield _quantise_klt(_BF16, rotary_dim=0)
    yield _quantise_klt(_BF16, rotary_dim=128, kernel="round")
    data = _empty(1 << 20, dtype=torch.uint8)
    chunks = [ans.AnsChunk(0, 1000, 100, TOKENS, 0)]
    yield Variant("ans_decode", ans, "ans_decode_kernel", lambda: ans.ans_decode(data, chunks, data))
    fitted = _empty(2, 9, dtype=torch.int64), TOKENS, data, _empty(16, ans.SLOTS, dtype=torch.int32), data
    for name, kernel in (("ans_decode fitted", "ans_decode"), ("decoding_tables", "decoding_tables")):
        launch = partial(ans.fitted_decode_table, data, *fitted, _empty(2, dtype=torch.int32))
        yield Variant(name, ans, f"{kernel}_kernel", launch)
    for dtype in (*FLOATS, FP8[0]):  # both are bytes
        yield _restore_exact(dtype, 2, 128, 128)
    yield _restore_exact(_BF16, 2, 80, 80)
    yield _restore_exact(_BF16, 1, 64, 512)
    yield Variant("xxh3", xxh3, "xxh3_kernel", lambda: xxh3.xxh3_sums(data, [(0, 1000)]), access="load")


def _restore_exact(dtype: torch.dtype, heads: int, k_dim: int, v_dim: int) -> Variant:
    k, v = ([_empty(SLOTS, 4 * heads, dim, dtype=dtype)[:, :heads]] for dim in (k_dim, v_dim))
    shape = restore_exact.exact_shape(k, v, LAYERS)
    rows, slots = _empty(2, shape.row_bytes // 8, dtype=torch.int64), _empty(TOKENS, dtype=torch.int64)
    launch = partial(restore_exact.launch_exact, shape, rows, slots, 64, TOKENS, heads)
    dims = f"{k_dim}" if k_dim == v_dim else f"{k_dim}+{v_dim}"
    return Variant(f"restore_exact {_name(dtype)} {heads}x{dims}", restore_exact, "restore_exact_kernel", launch)


def _restore_klt(
    dtype: torch.dtype,
    heads: int,
    dim: int,
    rotation: Literal["", "rotated", "interleaved", "mixed"],
    kernel: Literal["restore_klt", "exact_tokens"] = "restore_klt",
) -> Variant:
    # The buffers hold all heads of a model, of which a cell has some.
    buffer = _empty(SLOTS, 4 * heads, dim, dtype=dtype)[:, :heads]
    of_k = {"interleaved": rotation == "interleaved", "mixed": rotation == "mixed"}
    shape = restore_klt.klt_shape(buffer, buffer, LAYERS, dim if rotation else 0, **of_k)
    table, slots = _empty(2 * shape.row_bytes, dtype=torch.uint8), _empty(TOKENS, dtype=torch.int64)

    def launch() -> None:
        restore_klt.launch_klt(
            shape, dtype, restore_klt.VECTORS[0], restore_klt.OPTIONS[0], table, slots, 64, TOKENS, 1
        )

    kind = f" {rotation}" if rotation else ""
    return Variant(f"{kernel}{kind} {_name(dtype)} {heads}x{dim}", restore_klt, f"{kernel}_kernel", launch)


def _quantise_klt(dtype: torch.dtype, rotary_dim: int, kernel: Literal["centre", "round"] = "centre") -> Variant:
    buffers = [_empty(SLOTS, 8, 128, dtype=dtype)[:, :2] for _ in range(LAYERS)]
    channels, norms = 2 * LAYERS * 2 * 128, 2 * LAYERS * 2
    forward = KltForward(
        matrix=_empty(channels, channels, dtype=_BF16),
        mean=_empty(channels, dtype=torch.float32),
        inverse_spread=_empty(channels, dtype=torch.float32),
        sensitivity=_empty(channels + norms + 1, dtype=torch.float32),
        limits=_empty(channels, dtype=torch.float32),
        bits=_empty(channels, dtype=torch.int32),
        high=_empty(channels, dtype=torch.int32),
        inverse_steps=_empty(256, dtype=torch.float32),
        kept=1000,
        num_rows=1100,
        interleaved=False,
        turns=(0,) * LAYERS,
    )
    slots = _empty(TOKENS, dtype=torch.int64)
    rotations = _empty(1, TOKENS, rotary_dim, dtype=torch.float32) if rotary_dim else None

    def launch() -> None:
        cells = quantise_klt.KltCells(
            [quantise_klt.KltInput(forward, buffers, buffers)] * 2, lambda x: x.to(slots.device)
        )
        output = _empty(cells.output_rows, TOKENS, dtype=torch.uint8)
        cells.quantise(slots, rotations, 4, output)

    kind = " rotated" if rotary_dim else ""
    name = "round" if kernel == "round" else f"centre{kind} {_name(dtype)} 2x128"
    return Variant(name, quantise_klt, f"{kernel}_kernel", launch)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
