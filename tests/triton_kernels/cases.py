"""Tensors, layouts and shapes that the kernels' tests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvfetch.layout.choose import default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.quant.registry import QuantiserName
from sgl_kvfetch.quant.symmetric import SymmetricQuantiser
from sgl_kvfetch.triton_kernels.runtime import integer_view

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8S = (torch.float8_e4m3fn, torch.float8_e5m2)
# Every quantiser with every dtype that it takes.
KINDS: list[tuple[QuantiserName, torch.dtype]] = [
    *(("uint8", dtype) for dtype in FLOATS),
    *(("cachegen", dtype) for dtype in FLOATS),
    *(("exact", dtype) for dtype in (*FLOATS, *FLOAT8S)),
]
FIRST_LAYER = 9  # cachegen's K bins change after layer 9, so one group has different centres


@dataclass(frozen=True)
class Shape:
    tokens: int
    layers: int
    heads: int
    dim: int
    layout: FrameLayout | None = None

    def make_layout(self) -> FrameLayout:
        return self.layout or default_layout(self.heads, self.dim, self.tokens)


def wasteful(inter_frame: str = "sliced") -> FrameLayout:
    """Room left everywhere: in a tile for a head and for dims, in the picture on both sides, and few tiles a frame."""
    return FrameLayout(
        width=152,
        height=144,
        head_rows=2,
        head_cols=2,
        dim_rows=9,
        dim_cols=10,
        inter_frame=inter_frame,  # type: ignore[arg-type]
    )


def blocks_of_tokens(inter_frame: str = "sliced") -> FrameLayout:
    """Four tiles of three by four tokens a frame, room left as in ``wasteful``."""
    return FrameLayout(
        width=160,
        height=144,
        head_rows=3,
        head_cols=1,
        dim_rows=6,
        dim_cols=14,
        inter_frame=inter_frame,  # type: ignore[arg-type]
        token_rows=3,
        token_cols=4,
    )


SMALL = Shape(tokens=63, layers=2, heads=3, dim=80)  # for ``wasteful``: 56 tiles a frame, two frames
LATENT = Shape(tokens=21, layers=2, heads=1, dim=576)  # SGLang's ``MLATokenToKVPool``: kv_lora_rank + qk_rope_head_dim
PACKED_LATENT = Shape(tokens=21, layers=2, heads=1, dim=656)  # the same of sparse attention in fp8: bytes, with scales

ODD_SHAPES = [
    Shape(1, 1, 1, 48),
    Shape(63, 3, 8, 128),
    Shape(500, 1, 1, 64),
    Shape(500, 1, 3, 96),
    Shape(1000, 2, 1, 48),
    Shape(63, 1, 7, 256),
    Shape(7, 1, 128, 64),
    Shape(63, 1, 1, 52),  # no power of two above 4 divides it
]


def shape_id(shape: Shape) -> str:
    return f"{shape.tokens}x{shape.layers}x{shape.heads}x{shape.dim}"


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A buffer that nobody has written to."""
    size = dtype.itemsize
    for n in shape:
        size *= n
    return torch.full((size,), 0xAB, dtype=torch.uint8, device=DEVICE).view(dtype).view(shape)


def make_values(shape: Shape, dtype: torch.dtype, quantiser: Quantiser, seed: int = 0) -> torch.Tensor:
    """``(tokens, layers, heads, dim)``: for ``exact`` any bits at all, otherwise numbers with the awkward ones."""
    generator = torch.Generator().manual_seed(seed)
    size = (shape.tokens, shape.layers, shape.heads, shape.dim)
    if not isinstance(quantiser, SymmetricQuantiser):
        bits = torch.randint(0, 256, (*size[:-1], size[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
        return bits.view(dtype).to(DEVICE)
    magnitudes = 10.0 ** torch.randint(-3, 4, (*size[:3], 1), generator=generator)
    values = torch.randn(size, generator=generator) * magnitudes
    if shape.tokens > 8:
        values[1] = 0.0
        values[2] = -0.0
        values[3] *= torch.finfo(dtype).smallest_normal  # subnormal
        values[4] = values[4] / values[4].abs().max() * (0.9 * torch.finfo(dtype).max)
        values[5] = torch.randint(-127, 128, size[1:], generator=generator) / 2.0  # halfway between integers
        values[5, ..., 0] = 127.0
    return values.to(dtype).to(DEVICE)


def scattered_slots(tokens: int, num_slots: int, seed: int = 0) -> torch.Tensor:
    """Rows in no order, none twice."""
    return torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[:tokens].to(DEVICE)


def centres_of(quantiser: Quantiser, num_layers: int) -> dict[str, Any]:
    """The keyword that tells the kernels of a quantiser."""
    if isinstance(quantiser, SymmetricQuantiser):
        return {"centres": quantiser.centres("k", FIRST_LAYER, num_layers)}
    return {}


def scale_over(name: str) -> dict[str, Any]:
    return {"scale_over": "layer" if name == "cachegen" else "head"} if name != "exact" else {}


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    different = integer_view(found) != integer_view(expected)
    if different.any():
        first = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{int(different.sum())} of {different.numel()} differ, first {first}: {found[first]} != {expected[first]}"
        )
