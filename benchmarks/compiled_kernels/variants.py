"""Every variant of the kernels that is compiled, launched by its wrapper on tensors without memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from benchmarks.compiled_kernels.recorder import Recorder, recording
from sgl_kvfetch.layout.choose import channel_layout, default_layout
from sgl_kvfetch.triton_kernels import frame_sum, pack, restore, restore_klt
from sgl_kvfetch.triton_kernels.runtime import integer_view
from sgl_kvfetch.triton_kernels.tuning import Key, Operation, Tuning, candidates, key_of, look_up, read_table

TOKENS, SLOTS = 1000, 4096
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
HALVES = (torch.bfloat16, torch.float16)
_BF16 = torch.bfloat16


@dataclass(frozen=True)
class Variant:
    """``scales``: one a head or one for all, where both are possible. ``rotated``: K of ``restore_klt``."""

    operation: Operation
    dtype: torch.dtype
    heads: int = 8
    dim: int = 128
    scales: Literal["head", "layer"] | None = None
    rotated: bool = False
    layers: int = 3

    @property
    def access(self) -> Literal["load", "store"]:
        """What is done to KV buffers."""
        return "load" if self.operation.startswith("pack") else "store"

    @property
    def name(self) -> str:
        scales = f" {self.scales} scales" if self.scales else ""
        rotated = " rotated" if self.rotated else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation}{scales}{rotated} {dtype} {self.heads}x{self.dim}"

    def key(self, target: str) -> Key:
        buffer = self._buffer()
        return key_of(self.operation, integer_view(buffer) if self.operation.endswith("exact") else buffer, target)

    def record(self, tuning: Tuning) -> Recorder:
        buffers = [self._buffer() for _ in range(self.layers)]
        module = {"pack": pack, "restore": restore}.get(self.operation.partition("_")[0])
        kernel = f"{self.operation}_kernel"
        if self.operation.startswith("restore_klt"):
            module, kernel = restore_klt, "restore_klt_kernel"
        with recording(module, kernel) as recorder:
            if self.operation.startswith("restore_klt"):
                self._restore_klt(buffers, tuning)
            elif self.operation.startswith("pack"):
                self._pack(buffers, tuning)
            else:
                self._restore(buffers, tuning)
        return recorder

    def _buffer(self) -> torch.Tensor:
        return _empty(SLOTS, self.heads, self.dim, dtype=self.dtype)

    def _pack(self, buffers: list[torch.Tensor], tuning: Tuning) -> None:
        layout = default_layout(self.heads, self.dim, TOKENS)
        slots = _empty(TOKENS, dtype=torch.int64)
        if self.operation == "pack_exact":
            pack.pack(buffers, slots, layout, tuning=tuning)
        else:
            over: Literal["head", "layer"] = "head" if self.operation == "pack_head" else "layer"
            pack.pack(buffers, slots, layout, centres=(127,) * self.layers, scale_over=over, tuning=tuning)

    def _restore(self, buffers: list[torch.Tensor], tuning: Tuning) -> None:
        layout = default_layout(self.heads, self.dim, TOKENS)
        scales = centres = None
        if self.scales is not None:
            num_scales = self.heads if self.scales == "head" else 1
            scales, centres = _empty(TOKENS, self.layers, num_scales, dtype=_BF16), (127,) * self.layers
        num_planes = restore.planes_of(buffers, scales)
        frames = _empty(num_planes, layout.num_frames(TOKENS), 3, layout.height, layout.width, dtype=torch.uint8)
        slots = _empty(TOKENS, dtype=torch.int64)
        restore.restore(list(frames), layout, slots, buffers, scales=scales, centres=centres, tuning=tuning)

    def _restore_klt(self, outputs: list[torch.Tensor], tuning: Tuning) -> None:
        layout = channel_layout(self.heads, self.dim, TOKENS, "1080p")
        size = 2 * self.dim
        restore_klt.restore_klt(
            _empty(layout.num_frames(TOKENS), 3, layout.height, layout.width, dtype=torch.uint8),
            layout,
            _empty(TOKENS, dtype=torch.int64),
            outputs,
            scales=_empty(TOKENS, self.layers, 1, dtype=_BF16),
            inverse=_empty(self.layers, self.heads // 2, size, size, dtype=_BF16),
            step=0.25,
            means=_empty(self.layers, self.heads, self.dim, dtype=torch.float32),
            rotation=_empty(TOKENS, self.dim, dtype=torch.float32) if self.rotated else None,
            interleaved=self.operation == "restore_klt_interleaved",
            tuning=tuning,
        )


@dataclass(frozen=True)
class FrameSum:
    """``frame_sum``, which knows no KV buffer: what it reads are frames, in words of 8 bytes."""

    name: str = "frame_sum"
    access: Literal["load"] = "load"

    @property
    def tuning(self) -> Tuning:
        return Tuning(frame_sum.BLOCK_WORDS, frame_sum.NUM_WARPS)

    def record(self, tuning: Tuning) -> Recorder:
        with recording(frame_sum, "frame_sum_kernel") as recorder:
            frame_sum.frame_sum(_empty(4, 3, 480, 856, dtype=torch.uint8))
        return recorder


VARIANTS = (
    *(Variant(operation, x) for operation in ("pack_exact", "restore_exact") for x in (*FLOATS, torch.uint8)),
    *(Variant(operation, x) for operation in ("pack_head", "pack_layer") for x in FLOATS),
    *(Variant("restore_symmetric", x, scales=over) for over in ("head", "layer") for x in FLOATS),
    # SGLang's pools hold fp8 as bytes. MLA's one vector a token; of sparse attention in fp8, with its scales.
    *(
        Variant(x, dtype, 1, 576)
        for x in ("pack_exact", "pack_head", "pack_layer", "restore_exact")
        for dtype in HALVES
    ),
    *(Variant("restore_symmetric", dtype, 1, 576, scales="head") for dtype in HALVES),
    *(Variant(operation, torch.uint8, 1, x) for operation in ("pack_exact", "restore_exact") for x in (576, 656)),
    *(Variant("restore_klt", x, rotated=True) for x in FLOATS),
    Variant("restore_klt", _BF16),
    *(Variant("restore_klt", _BF16, dim=x, rotated=True) for x in (64, 80, 256)),
    *(Variant("restore_klt_interleaved", x, rotated=True) for x in FLOATS),
)


def chosen(targets: Iterable[str]) -> Iterator[tuple[Variant | FrameSum, str, Tuning]]:
    """Every variant with what the table says, for each target; and what the table knows besides."""
    for target in targets:
        keys = {variant.key(target) for variant in VARIANTS}
        others = [_variant_of(key) for key in read_table() if key.target == target and key not in keys]
        for variant in (*VARIANTS, *others):
            yield variant, target, look_up(variant.key(target))
        yield FrameSum(), target, FrameSum().tuning


def klt_candidates(targets: Iterable[str]) -> Iterator[tuple[Variant, str, Tuning]]:
    """Whatever ``restore_klt`` may be launched with, on one layer."""
    for target in targets:
        for dim in (64, 128):
            for tuning in candidates("restore_klt", target, dim):
                yield Variant("restore_klt", _BF16, dim=dim, layers=1), target, tuning


def _variant_of(key: Key) -> Variant:
    is_klt = key.operation.startswith("restore_klt")
    return Variant(
        key.operation,
        getattr(torch, key.dtype),
        dim=key.head_dim,
        scales="head" if key.operation == "restore_symmetric" else None,
        rotated=is_klt,
    )


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
