from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvfetch.errors import FormatError, QuantiseError, UnsupportedError
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.quant.registry import QuantiserName
from sgl_kvfetch.triton_kernels.pack import Packed, pack, pack_reference
from sgl_kvfetch.triton_kernels.restore import restore
from tests.triton_kernels.cases import (
    DEVICE,
    FIRST_LAYER,
    FLOATS,
    KINDS,
    LATENT,
    ODD_SHAPES,
    PACKED_LATENT,
    SMALL,
    Shape,
    assert_same_bits,
    blocks_of_tokens,
    centres_of,
    make_values,
    poisoned,
    scale_over,
    scattered_slots,
    shape_id,
    wasteful,
)

NUM_SLOTS = 1024

Pack = Callable[..., Packed]


def reference(buffers: Any, slots: Any, layout: Any, *, centres: Any = None, scale_over: Any = "head") -> Packed:
    return pack_reference(buffers, slots, layout, centres, scale_over)


both = pytest.mark.parametrize("run", [pack, reference], ids=["kernel", "reference"])


def buffers_with(values: torch.Tensor, slots: torch.Tensor) -> list[torch.Tensor]:
    """Poisoned buffers that hold ``(tokens, layers, heads, dim)`` in the slots."""
    buffers = []
    for layer in values.unbind(1):
        buffer = poisoned(NUM_SLOTS, *layer.shape[1:], dtype=values.dtype)
        buffer.view(torch.uint8)[slots] = layer.contiguous().view(torch.uint8)
        buffers.append(buffer)
    return buffers


def check(run: Pack, name: QuantiserName, dtype: torch.dtype, shape: Shape, layout: FrameLayout | None = None) -> None:
    quantiser = make_quantiser(name)
    layout = layout or shape.make_layout()
    values = make_values(shape, dtype, quantiser)
    slots = scattered_slots(shape.tokens, NUM_SLOTS)
    packed = run(buffers_with(values, slots), slots, layout, **centres_of(quantiser, shape.layers), **scale_over(name))
    assert_packed(packed, name, values, layout)


def assert_packed(packed: Packed, name: QuantiserName, values: torch.Tensor, layout: FrameLayout) -> None:
    expected = make_quantiser(name).quantise(values, "k", FIRST_LAYER)
    assert_same_bits(packed.frames, torch.stack([layout.to_frames(x) for x in expected.integers]))
    if expected.scales is None:
        assert packed.scales is None
    else:
        assert packed.scales is not None
        assert_same_bits(packed.scales, expected.scales)
    packed.require_finite()


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
@pytest.mark.parametrize(("name", "dtype"), KINDS, ids=str)
def test_same_bits_as_the_quantiser(name: QuantiserName, dtype: torch.dtype, inter_frame: str, run: Pack) -> None:
    check(run, name, dtype, SMALL, wasteful(inter_frame))


@both
@pytest.mark.parametrize("inter_frame", ["sliced", "sequential"])
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_blocks_of_tokens(name: QuantiserName, inter_frame: str, run: Pack) -> None:
    check(run, name, torch.bfloat16, SMALL, blocks_of_tokens(inter_frame))


@both
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=shape_id)
@pytest.mark.parametrize("name", ["uint8", "exact"])
def test_shapes(name: QuantiserName, shape: Shape, run: Pack) -> None:
    check(run, name, torch.bfloat16, shape)


@both
@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [*((*kind, LATENT) for kind in KINDS), ("exact", torch.uint8, LATENT), ("exact", torch.uint8, PACKED_LATENT)],
    ids=lambda x: shape_id(x) if isinstance(x, Shape) else str(x),
)
def test_one_latent_vector_a_token(name: QuantiserName, dtype: torch.dtype, shape: Shape, run: Pack) -> None:
    check(run, name, dtype, shape)


@both
@pytest.mark.parametrize("shape", [Shape(3, 3, 8, 128), Shape(3, 2, 128, 64), Shape(3, 1, 7, 52)], ids=shape_id)
def test_shapes_with_one_scale_for_all_heads(shape: Shape, run: Pack) -> None:
    """Fewer tokens: the interpreter is slow at a program a token. One shape takes several blocks."""
    grids = {8: (2, 4, 8, 16), 128: (8, 16, 8, 8), 7: (1, 7, 4, 13)}
    head_rows, head_cols, dim_rows, dim_cols = grids[shape.heads]
    one_tile = FrameLayout(
        width=max(144, head_cols * dim_cols),
        height=max(144, head_rows * dim_rows),
        head_rows=head_rows,
        head_cols=head_cols,
        dim_rows=dim_rows,
        dim_cols=dim_cols,
    )
    check(run, "cachegen", torch.bfloat16, shape, one_tile)


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen"])
def test_values_that_are_not_finite_are_reported(name: QuantiserName, run: Pack) -> None:
    shape = Shape(7, 2, 3, 80)
    quantiser = make_quantiser(name)
    values = make_values(shape, torch.float32, quantiser)
    slots = scattered_slots(shape.tokens, NUM_SLOTS)
    arguments = {**centres_of(quantiser, shape.layers), **scale_over(name)}
    for worst in (float("nan"), float("inf"), float("-inf")):
        broken = values.clone()
        broken[2, 1] = worst
        broken[3, 0, 1, 7] = worst
        packed = run(buffers_with(broken, slots), slots, wasteful(), **arguments)
        with pytest.raises(QuantiseError, match="not finite"):
            packed.require_finite()
        broken[2, 1] = 0.0
        broken[3, 0, slice(1, 2) if name == "uint8" else slice(None)] = 0.0
        assert packed.not_finite is not None
        packed.not_finite.zero_()
        assert_packed(packed, name, broken, wasteful())


@both
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["uint8", "cachegen"])
def test_the_largest_values_keep_their_step_within_the_dtype(
    name: QuantiserName, dtype: torch.dtype, run: Pack
) -> None:
    shape = Shape(7, 2, 3, 80)
    quantiser = make_quantiser(name)
    values = make_values(shape, dtype, quantiser)
    values[::2, :, :, 5] = torch.finfo(dtype).max
    slots = scattered_slots(shape.tokens, NUM_SLOTS)
    arguments = {**centres_of(quantiser, shape.layers), **scale_over(name)}
    assert_packed(run(buffers_with(values, slots), slots, wasteful(), **arguments), name, values, wasteful())


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_a_negative_slot_reads_as_zeros(name: QuantiserName, run: Pack) -> None:
    quantiser = make_quantiser(name)
    values = make_values(SMALL, torch.bfloat16, quantiser)
    slots = scattered_slots(SMALL.tokens, NUM_SLOTS)
    buffers = buffers_with(values, slots)
    absent = torch.arange(SMALL.tokens, device=DEVICE) % 3 == 1
    packed = run(
        buffers,
        torch.where(absent, -1, slots),
        wasteful(),
        **centres_of(quantiser, SMALL.layers),
        **scale_over(name),
    )
    values.view(torch.int16)[absent] = 0
    assert_packed(packed, name, values, wasteful())


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_slots_and_heads_apart(name: QuantiserName, run: Pack) -> None:
    shape = Shape(9, 2, 3, 80)
    quantiser = make_quantiser(name)
    values = make_values(shape, torch.bfloat16, quantiser)
    slots = scattered_slots(shape.tokens, NUM_SLOTS)
    whole = poisoned(shape.layers, NUM_SLOTS, 2, shape.heads, 3, shape.dim, dtype=torch.bfloat16)
    buffers = [layer[:, 1, :, 2] for layer in whole]
    for layer, buffer in enumerate(buffers):
        buffer.view(torch.int16)[slots] = values[:, layer].contiguous().view(torch.int16)
    packed = run(buffers, slots, wasteful(), **centres_of(quantiser, shape.layers), **scale_over(name))
    assert_packed(packed, name, values, wasteful())


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_slots_past_two_to_the_31(name: QuantiserName, run: Pack) -> None:
    """Offsets that 32 bits do not hold. The memory is only reserved: what is not touched costs nothing."""
    shape = Shape(5, 1, 1, 256)
    quantiser = make_quantiser(name)
    values = make_values(shape, torch.bfloat16, quantiser)
    num_slots = 2**31 // 256 + 64
    buffer = torch.empty((num_slots, 1, 256), dtype=torch.bfloat16, device=DEVICE)
    slots = num_slots - 1 - torch.arange(5, device=DEVICE) * 2
    buffer.view(torch.int16)[slots] = values[:, 0].view(torch.int16)
    layout = shape.make_layout()
    packed = run([buffer], slots, layout, **centres_of(quantiser, 1), **scale_over(name))
    assert_packed(packed, name, values, layout)


@both
@pytest.mark.parametrize("name", ["uint8", "cachegen", "exact"])
def test_no_tokens(name: QuantiserName, run: Pack) -> None:
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    buffers = [poisoned(8, 3, 80, dtype=torch.bfloat16)]
    packed = run(buffers, slots, wasteful(), **centres_of(make_quantiser(name), 1), **scale_over(name))
    assert packed.frames.shape[1:] == (0, 3, 144, 152)
    packed.require_finite()


def test_restore_brings_back_what_was_packed() -> None:
    values = make_values(SMALL, torch.bfloat16, make_quantiser("exact"))
    slots = scattered_slots(SMALL.tokens, NUM_SLOTS)
    packed = pack(buffers_with(values, slots), slots, wasteful())
    other_slots = scattered_slots(SMALL.tokens, NUM_SLOTS, seed=1)
    outputs = [poisoned(NUM_SLOTS, SMALL.heads, SMALL.dim, dtype=torch.bfloat16) for _ in range(SMALL.layers)]
    restore(list(packed.frames), wasteful(), other_slots, outputs)
    for found, expected in zip(outputs, buffers_with(values, other_slots), strict=True):
        assert_same_bits(found, expected)


def test_arguments_that_do_not_fit() -> None:
    buffers = [poisoned(8, 3, 80, dtype=torch.bfloat16)] * 2
    slots = torch.arange(5, device=DEVICE)
    with pytest.raises(ValueError, match=r"centres are \[127\], expected 2 of 1 to 127"):
        pack(buffers, slots, wasteful(), centres=[127])
    with pytest.raises(ValueError, match="centres are"):
        pack(buffers, slots, wasteful(), centres=[127, 0])
    with pytest.raises(ValueError, match="0 buffers"):
        pack([], slots, wasteful())
    with pytest.raises(ValueError, match=r"buffer has shape \(8, 240\)"):
        pack([buffers[0].view(8, 240)], slots, wasteful())
    with pytest.raises(FormatError, match="cannot hold 5 heads of 80"):
        pack([poisoned(8, 5, 80, dtype=torch.bfloat16)], slots, wasteful())
    with pytest.raises(UnsupportedError, match="only the exact quantiser"):
        pack([poisoned(8, 3, 80, dtype=torch.float8_e4m3fn)], slots, wasteful(), centres=[127])
