"""restore_klt: restore cells of transform coefficients to slots of the K and V buffers, any number of cells a launch.

This inverts the quantiser ``klt`` in one pass: multiply coefficients by their cell's matrix and the token's step, add
the mean, and for K apply the rotary embedding again, which the quantiser removed. Tokens that are kept exact follow.

A launch has a *table*, a row of numbers a cell: addresses of what the kernels read and write, and sizes. So its cost on
the host does not depend on the number of cells, and cells of any length and layout share the compiled kernels.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec.quant.base import from_planes
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    FP8_MANTISSA,
    INTEGERS,
    INTERPRETED,
    STORED,
    jit,
    next_power_of_2,
    on_device,
    require,
    require_buffers,
    require_scalable,
    require_tensor,
    slots_of,
    stored_values,
    tl,
    use_kernels,
)

ZERO = 128  # the integer that represents zero
EXACT = 0  # the exponent of tokens that are kept exact

COEFFICIENTS = 64  # multiplied in one step of the loop
_MOST_PAIRS = 64  # pairs of channels that a program sums
_LEAST_PAIRS = 8  # tensor cores multiply 16 columns or more
_WARP_TOKENS = 16  # a warp's share: its sums of 128 channels are 64 registers a thread
VECTORS = _VECTOR, _SCALAR = 16, 1  # neighbouring tokens whose integers a thread loads at once
_ALIGNMENT = 16  # of channels, in values


class _Heads(NamedTuple):
    """The heads of K or V: a constant of the kernels. Triton can hash it, as it is a tuple."""

    dim: int
    slot: int  # strides of a buffer, in values
    head: int
    rotary_dim: int  # 0 without a rotation
    pairs: int  # of channels, in one program; a power of two
    run: int  # that many channels follow each other in a program's columns
    block: int  # a power of two that holds all heads


class KltShape(NamedTuple):
    """What all cells of a launch have in common: a constant of the kernels."""

    layers: int  # of the largest cell
    heads: int
    interleaved: bool  # whether pair i of K is channels (2i, 2i + 1), as in GPT-J, and not (i, i + rotary_dim / 2)
    mixed: bool  # whether layers have rotations of their own
    align: int  # divides dims and strides
    k: _Heads
    v: _Heads

    @property
    def row_bytes(self) -> int:
        """The size of a cell's row in a table."""
        return 8 * (_F.outputs + 3 * self.layers)


def klt_shape(
    k: torch.Tensor,
    v: torch.Tensor,
    layers: int,
    rotary_dim: int = 0,
    *,
    interleaved: bool = False,
    mixed: bool = False,
) -> KltShape:
    """Return the shape of cells of these heads. ``k`` and ``v``: a layer's buffers, ``(num_slots, heads, dim)``.
    ``layers``: of the largest cell. Raises ValueError for a rotation of an odd number of values, or of too many."""
    dim = k.shape[2]
    require(
        rotary_dim == 0 or (rotary_dim % 2 == dim % 2 == 0 and 2 <= rotary_dim <= dim),
        lambda: f"rotation of {rotary_dim} of the {dim} values of a head, expected even numbers",
    )
    interleaved = interleaved and rotary_dim > 0
    align = math.gcd(k.shape[2], v.shape[2], *k.stride()[:2], *v.stride()[:2], _ALIGNMENT)
    sides = _heads_of(k, rotary_dim, interleaved=interleaved), _heads_of(v, 0, interleaved=False)
    return KltShape(layers, k.shape[1], interleaved, mixed and rotary_dim > 0, align, *sides)


def _heads_of(buffer: torch.Tensor, rotary_dim: int, *, interleaved: bool) -> _Heads:
    _, heads, dim = buffer.shape
    num_pairs = -(-dim // 2)
    pairs = min(_MOST_PAIRS, max(_LEAST_PAIRS, next_power_of_2(num_pairs)))
    run = 2 * pairs if interleaved else math.gcd(pairs, num_pairs, rotary_dim // 2)
    return _Heads(dim, *buffer.stride()[:2], rotary_dim, pairs, run, next_power_of_2(heads * dim))


class KltOptions(NamedTuple):
    """How `restore_klt` is compiled. Which is fastest depends on the device and on Triton; the results
    differ by the order of sums alone.

    Attributes:
        tokens: Of one program. Twice as many take twice the warps, and read the matrix half as often.
        is_transposed: Whether the product is computed as channels x tokens. Then integers are loaded, converted and
            put into shared memory 16 neighbouring tokens at a time; else each thread reads its own from there one by
            one, and multiplies them from registers.
        num_stages: How many steps of the loop are in shared memory.
        most_registers: Of a thread; 0 for as many as the compiler takes.
    """

    tokens: int
    is_transposed: bool
    num_stages: int
    most_registers: int

    @property
    def launch(self) -> dict[str, int]:
        """The arguments of a launch."""
        limit = {"maxnreg": self.most_registers} if self.most_registers else {}
        return {"num_warps": self.tokens // _WARP_TOKENS, "num_stages": self.num_stages, **limit}

    def __str__(self) -> str:
        limit = f", {self.most_registers} registers" if self.most_registers else ""
        order = ", transposed" if self.is_transposed else ""
        return f"{self.tokens} tokens, {self.num_stages} stages{limit}{order}"


# The first is the default. With 128 registers a multiprocessor has 16 warps: two programs of 128 tokens, or one of 256.
OPTIONS = (
    KltOptions(tokens=128, is_transposed=False, num_stages=2, most_registers=0),
    KltOptions(tokens=128, is_transposed=False, num_stages=2, most_registers=128),
    KltOptions(tokens=128, is_transposed=True, num_stages=2, most_registers=128),
    KltOptions(tokens=256, is_transposed=False, num_stages=2, most_registers=128),
    KltOptions(tokens=256, is_transposed=True, num_stages=2, most_registers=128),
)


class _Fields(NamedTuple):
    """The position of each field in a table's row, in words of 8 bytes: a constant of the kernels. The first six fields
    describe the cell, the others its `KltModel`."""

    data: int  # address of the bytes of `pack`
    tokens: int  # number
    pages: int  # address of the page table
    exact: int  # number of exact tokens
    integers: int  # address
    rotations: int  # address
    coefficients: int  # number
    channels: int  # number
    matrix: int  # address
    mean: int  # address
    scales: int  # address
    layers: int  # number
    outputs: int  # addresses of K's layers, then of V's, as many as the largest cell has; then which rotations K has


_F = _Fields(*range(len(_Fields._fields)))
_OWN_FIELDS = _Fields._fields[: _F.coefficients]


@dataclass(frozen=True, eq=False)
class KltModel:
    """What restores of some layers and heads need, whatever the cell holds. It stays on the device.

    Attributes:
        matrix: bfloat16 ``(coefficients, channels)``, contiguous, a row a coefficient. Channels are ordered by tensor
            (K, then V), layer, head and dim.
        mean: float32 ``(channels,)``.
        scales: float32 ``(256,)``, a token's step width by its exponent.
        k: Each layer's buffer, ``(num_slots, heads, dim)`` of the cell's heads, of equal shape, strides and dtype. Only
            ``dim`` must be contiguous.
        v: The same for V.
        turns: Which rotation each layer's K has; all 0 if the shape is not mixed.

    Raises:
        ValueError: tensors that do not fit together.
        UnsupportedError: a dtype that cannot be scaled.
    """

    shape: KltShape
    matrix: torch.Tensor
    mean: torch.Tensor
    scales: torch.Tensor
    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]
    turns: Sequence[int]

    def __post_init__(self) -> None:
        """Raises ValueError if buffers, matrix or tables do not fit the shape that the kernel is compiled for."""
        shape, device = self.shape, self.matrix.device
        for buffers, side in ((self.k, shape.k), (self.v, shape.v)):
            require_buffers(buffers)
            found = (*buffers[0].shape[1:], *buffers[0].stride()[:2], buffers[0].dtype, buffers[0].device)
            expected = shape.heads, side.dim, side.slot, side.head, self.dtype, device
            require(found == expected, lambda f=found, e=expected: f"buffers are {f}, expected {e}")  # type: ignore[misc]
            unit = shape.align * self.dtype.itemsize
            is_aligned = all(x.data_ptr() % unit == 0 for x in buffers)
            require(is_aligned, lambda n=unit: f"a buffer does not begin at a multiple of {n} bytes")  # type: ignore[misc]
        require_scalable(self.dtype)
        num_layers = len(self.k)
        require(num_layers == len(self.v) <= shape.layers, lambda: f"{num_layers} layers of K, {len(self.v)} of V")
        require(num_layers == len(self.turns), lambda: f"{num_layers} layers, rotations of {len(self.turns)}")
        require(shape.mixed or not any(self.turns), lambda: "layers have rotations of their own, and the shape has one")
        channels = len(self.k) * shape.heads * (shape.k.dim + shape.v.dim)
        for name, x, dtype, size in (
            ("matrix", self.matrix, torch.bfloat16, (self.matrix.shape[0], channels)),
            ("mean", self.mean, torch.float32, (channels,)),
            ("scales", self.scales, torch.float32, (256,)),
        ):
            require_tensor(name, x, dtype, size, device)

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @cached_property
    def num_coefficients(self) -> int:
        return len(self.matrix)

    @cached_property
    def words(self) -> bytes:
        """The part of a cell's row that describes its model."""
        room = (0,) * (self.shape.layers - len(self.k))
        addresses = [x.data_ptr() for x in (self.matrix, self.mean, self.scales)]
        outputs = (*(x.data_ptr() for x in self.k), *room, *(x.data_ptr() for x in self.v), *room, *self.turns, *room)
        return array("q", (*self.matrix.shape, *addresses, len(self.k), *outputs)).tobytes()


@dataclass(eq=False, slots=True)
class KltCell:
    """A cell to restore. Its tensors are on the device.

    ``integers``: uint8 ``(coefficients, tokens)``, contiguous. ``rotations``: float32 ``(rotations, tokens,
    rotary_dim)``, the cosines of each token's position, then its sines (``Rotations.table``); None without a rotation.
    ``data``: uint8 memory that has the page table and the bytes of `pack` from ``offset`` on, a multiple of 4.
    """

    model: KltModel
    integers: torch.Tensor
    rotations: torch.Tensor | None
    num_pages: int
    num_exact: int
    data: torch.Tensor
    offset: int

    @property
    def num_tokens(self) -> int:
        return self.integers.shape[1]

    def row(self) -> bytes:
        """Return the cell's row of a table. Raises ValueError if the integers do not fit the model."""
        x = self.integers
        expected = self.model.num_coefficients, x.shape[-1]
        vector = vector_of(x.shape[-1])
        require(
            x.shape == expected and x.dtype == torch.uint8 and x.is_contiguous() and x.data_ptr() % vector == 0,
            lambda: (
                f"integers are {x.dtype} {tuple(x.shape)} with strides {x.stride()}, expected contiguous uint8 "
                f"{expected} at a multiple of {vector} bytes"
            ),
        )
        rotations = 0 if self.rotations is None else self.rotations.data_ptr()
        pages = self.data.data_ptr() + self.offset
        own = self.num_tokens, pages, self.num_exact, x.data_ptr(), rotations
        return array("q", (pages + 4 * self.num_pages, *own)).tobytes() + self.model.words


def vector_of(num_tokens: int) -> int:
    """Return the number of neighbouring tokens whose integers can be loaded at once, if cells have so many tokens."""
    return _VECTOR if num_tokens % _VECTOR == 0 else _SCALAR


def klt_rows(shape: KltShape, cells: Mapping[str, np.ndarray], models: Sequence[KltModel]) -> np.ndarray:
    """Return the rows of many cells, int64 ``(cells, row_bytes / 8)``, as ``KltCell.row`` makes them one by one.

    ``cells``: by name, int64 ``(cells,)`` each. ``data``, ``tokens``, ``pages``, ``exact``, ``integers`` and
    ``rotations`` are as in `_Fields`; ``models`` are indices into the argument of this name.
    """
    rows = np.empty((len(cells["data"]), shape.row_bytes // 8), dtype=np.int64)
    for field in _OWN_FIELDS:
        rows[:, getattr(_F, field)] = cells[field]
    of_models = np.frombuffer(b"".join([each.words for each in models]), dtype=np.int64).reshape(len(models), -1)
    rows[:, _F.coefficients :] = of_models[cells["models"]]
    return rows


def restore_klt(
    cells: Sequence[KltCell],
    table: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    options: KltOptions = OPTIONS[0],
) -> None:
    """Write K and V of cells' tokens, as ``KltQuantiser.dequantise`` does.

    CPU tensors use the reference, unless Triton's interpreter is on. All others use the kernels, on the current stream.
    Everything is computed in float32, in this order: ``integer - 128`` times the matrix, times the token's scale, plus
    the mean; then the rotation; then values are limited to the buffers' finite range and rounded to nearest, ties to
    even. Integers and matrix are exact in bfloat16, so their products are exact, and only the order of the sums is
    open. Results differ from the reference by the effect of that order in float32 (a rounding a coefficient), and by
    one unit in the last place of the buffers if that changes their rounding. Exact tokens have the same bits.

    Args:
        cells: One or more, of models of one shape and dtype. No two write to the same place. A page behind the last
            slot is left out, like page -1.
        table: uint8 ``(cells * row_bytes,)`` on the device: their rows. A launch reads nothing else of ``cells``.
        slots: int64 ``(pages * page_size,)``: the buffers' rows of the pages that cells refer to. They must be unique,
            and within the buffers, which is not checked. -1 skips a token.
    """
    if not use_kernels(slots.device):
        for cell in cells:
            restore_klt_reference(cell, slots, page_size)
        return
    shape, dtype = cells[0].model.shape, cells[0].model.dtype
    vector = min(vector_of(cell.num_tokens) for cell in cells)
    most = max(cell.num_tokens for cell in cells), max(cell.num_exact for cell in cells)
    launch_klt(shape, dtype, vector, options, table, slots, page_size, *most)


def restore_klt_reference(cell: KltCell, slots: torch.Tensor, page_size: int) -> None:
    """Restore one cell in PyTorch, on any device."""
    model, shape, dtype, num_tokens = cell.model, cell.model.shape, cell.model.dtype, cell.num_tokens
    sizes = 4 * cell.num_pages, 4 * cell.num_exact, num_tokens
    pages, which, exponents = cell.data[cell.offset :][: sum(sizes)].split(sizes)
    token = torch.arange(num_tokens, device=slots.device)
    which_slot = pages.view(torch.int32).long()[token // page_size] * page_size + token % page_size
    is_there = (which_slot >= 0) & (which_slot < len(slots))
    rows = torch.full_like(token, -1)
    rows[is_there] = slots[which_slot[is_there]]
    n = cell.integers.to(torch.float32) - ZERO
    x = (n.T @ model.matrix.to(torch.float32)) * model.scales[exponents.int(), None] + model.mean
    exact = cell.data[cell.offset + sum(sizes) :][: cell.num_exact * x.shape[1] * dtype.itemsize]
    planes = exact.cpu().view(cell.num_exact, dtype.itemsize, x.shape[1]).movedim(1, 0)
    exact = from_planes(planes, dtype).to(x.device)
    num_k, largest = len(model.k) * shape.heads * shape.k.dim, torch.finfo(dtype).max
    for buffers, channels in ((model.k, slice(num_k)), (model.v, slice(num_k, None))):
        values = x[:, channels].reshape(num_tokens, len(buffers), *buffers[0].shape[1:])
        if channels.start is None and cell.rotations is not None:
            values = _rotated(values, cell.rotations[list(model.turns)], shape.interleaved)
        values = values.clamp(-largest, largest).to(dtype)
        values[which.view(torch.int32).long()] = exact[:, channels].reshape(cell.num_exact, *values.shape[1:])
        for i_layer, buffer in enumerate(buffers):
            buffer[rows[rows >= 0]] = values[rows >= 0, i_layer]


def _rotated(x: torch.Tensor, rotations: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Rotate ``(tokens, layers, heads, dim)`` by ``(layers, tokens, rotary_dim)``."""
    rotary_dim = rotations.shape[2]
    half = rotary_dim // 2
    first, second = slice(0, half), slice(half, rotary_dim)
    if interleaved:
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    cos, sin = rotations.transpose(0, 1)[:, :, None].split(half, dim=-1)
    y = x.clone()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return y


def launch_klt(
    shape: KltShape,
    dtype: torch.dtype,
    vector: int,
    options: KltOptions,
    table: torch.Tensor,
    slots: torch.Tensor,
    page_size: int,
    most_tokens: int,
    most_exact: int,
) -> None:
    """Launch the kernels: one for all tokens, then one for exact tokens if a cell has any. Cells have up to
    ``most_tokens`` tokens and ``most_exact`` exact ones. Their numbers of tokens, and the addresses of their integers,
    are multiples of ``vector``. Rows of zeros write nothing."""
    num_cells, num_blocks = (
        table.numel() // shape.row_bytes,
        -(-most_tokens // options.tokens),
    )  # triton.cdiv takes 4 us
    tiles = shape.layers * shape.heads * sum(-(-x.dim // (2 * x.pairs)) for x in (shape.k, shape.v))
    table = table.view(torch.int64)
    common = {"LAYERS": shape.layers, "HEADS": shape.heads, "K": shape.k, "V": shape.v, "F": _F}
    with on_device(slots.device):
        restore_klt_kernel[(num_cells * tiles * num_blocks,)](
            table,
            slots,
            slots.numel(),
            page_size,
            num_blocks,
            **common,
            INTERLEAVED=shape.interleaved,
            MIXED=shape.mixed,
            ALIGN=shape.align,
            VECTOR=vector,
            FACTOR=tl.float32 if INTERPRETED else tl.bfloat16,  # the interpreter would multiply bits as integers
            DTYPE=STORED[dtype],
            MANTISSA=FP8_MANTISSA.get(dtype, 0),
            LARGEST=torch.finfo(dtype).max,
            COEFFICIENTS=COEFFICIENTS,
            TOKENS=options.tokens,
            IS_TRANSPOSED=options.is_transposed,
            **options.launch,
            **COMPILE_OPTIONS,
        )
        if most_exact:
            exact_tokens_kernel[(num_cells * most_exact,)](
                table, slots, slots.numel(), page_size, most_exact, **common, DTYPE=INTEGERS[dtype.itemsize],
                ITEMSIZE=dtype.itemsize, **COMPILE_OPTIONS,
            )  # fmt: skip


@jit
def _channels_of(o_pair, DIM: tl.constexpr, ROTARY_DIM: tl.constexpr):
    """Return the two channels of each pair. Channels without rotation are paired too; an odd one has no second."""
    NUM_PAIRS: tl.constexpr = (DIM + 1) // 2
    TURNED: tl.constexpr = ROTARY_DIM // 2
    if TURNED == 0 or TURNED == NUM_PAIRS:
        return o_pair, o_pair + NUM_PAIRS
    else:
        o_first = tl.where(o_pair < TURNED, o_pair, o_pair + TURNED)
        return o_first, tl.where(o_pair < TURNED, o_pair + TURNED, o_pair + NUM_PAIRS)


@jit
def restore_klt_kernel(
    p_table,  # (cells, row)
    p_slots,  # (num_slots,)
    num_slots,
    page_size,
    num_blocks,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MIXED: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    FACTOR: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    """Each program handles TOKENS tokens and the pairs of channels of one head of one layer, of K or V; of a large head
    some pairs."""
    K_BLOCKS: tl.constexpr = (K.dim + 2 * K.pairs - 1) // (2 * K.pairs)
    V_BLOCKS: tl.constexpr = (V.dim + 2 * V.pairs - 1) // (2 * V.pairs)
    K_TILES: tl.constexpr = LAYERS * HEADS * K_BLOCKS
    TILES: tl.constexpr = K_TILES + LAYERS * HEADS * V_BLOCKS
    # Adjacent programs are the token blocks, which read the same columns of the matrix.
    i_block = tl.program_id(0) % num_blocks
    i_tile = tl.program_id(0) // num_blocks % TILES
    p_row = p_table + tl.program_id(0) // num_blocks // TILES * (F.outputs + 3 * LAYERS)
    is_k = i_tile < K_TILES
    i_tile = tl.where(is_k, i_tile, i_tile - K_TILES)
    i_layer = i_tile // tl.where(is_k, HEADS * K_BLOCKS, HEADS * V_BLOCKS)
    num_layers = tl.load(p_row + F.layers).to(tl.int32)
    num_tokens = tl.load(p_row + F.tokens).to(tl.int32)
    if (i_layer >= num_layers) | (i_block * TOKENS >= num_tokens):
        return
    p_output = tl.load(p_row + F.outputs + tl.where(is_k, 0, LAYERS) + i_layer).to(tl.pointer_type(DTYPE))
    o_token = i_block * TOKENS + tl.arange(0, TOKENS)
    if is_k:
        _restore_tile(
            p_row, p_slots, num_slots, page_size, num_tokens, o_token, p_output,
            i_layer * HEADS + i_tile // K_BLOCKS % HEADS, i_tile // K_BLOCKS % HEADS, i_tile % K_BLOCKS, 0, K, F,
            LAYERS, HEADS, INTERLEAVED, MIXED, ALIGN, VECTOR, FACTOR, MANTISSA, LARGEST, COEFFICIENTS, TOKENS,
            IS_TRANSPOSED,
        )  # fmt: skip
    else:
        _restore_tile(
            p_row, p_slots, num_slots, page_size, num_tokens, o_token, p_output,
            i_layer * HEADS + i_tile // V_BLOCKS % HEADS, i_tile // V_BLOCKS % HEADS, i_tile % V_BLOCKS,
            num_layers * (HEADS * K.dim), V, F, LAYERS, HEADS, False, False, ALIGN, VECTOR, FACTOR, MANTISSA, LARGEST,
            COEFFICIENTS, TOKENS, IS_TRANSPOSED,
        )  # fmt: skip


@jit
def _restore_tile(
    p_row,
    p_slots,
    num_slots,
    page_size,
    num_tokens,
    o_token,
    p_output,  # (num_slots, heads, dim)
    i_layer_head,
    i_head,
    i_block,  # of pairs
    first_channel,  # of K or V in the matrix
    H: tl.constexpr,
    F: tl.constexpr,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    MIXED: tl.constexpr,
    ALIGN: tl.constexpr,
    VECTOR: tl.constexpr,
    FACTOR: tl.constexpr,
    MANTISSA: tl.constexpr,
    LARGEST: tl.constexpr,
    COEFFICIENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    """Restore TOKENS tokens of some pairs of channels of one head.

    Both channels of all pairs are columns of one product, so the integers are read and converted once. Turning a pair
    is then arithmetic between two blocks of the same shape.
    """
    PAIRS: tl.constexpr = H.pairs
    RUN: tl.constexpr = H.run  # up to Triton 3.6, a named tuple's field is a plain number, which `multiple_of` refuses
    NUM_PAIRS: tl.constexpr = (H.dim + 1) // 2
    IS_FULL: tl.constexpr = H.dim % (2 * H.pairs) == 0  # no column is without a channel
    num_coefficients = tl.load(p_row + F.coefficients).to(tl.int32)
    stride_row = tl.multiple_of(tl.load(p_row + F.channels).to(tl.int32), ALIGN)
    i_first = first_channel + i_layer_head * H.dim
    # Loaded here: what is said of an argument's multiples is lost.
    stride_token = tl.multiple_of(tl.load(p_row + F.tokens).to(tl.int32), VECTOR)
    p_integers = tl.multiple_of(tl.load(p_row + F.integers).to(tl.pointer_type(tl.uint8)), VECTOR)
    p_matrix = tl.multiple_of(tl.load(p_row + F.matrix).to(tl.pointer_type(tl.bfloat16)) + i_first, 2 * ALIGN)
    p_output = tl.multiple_of(p_output + i_head * H.head, p_output.dtype.element_ty.primitive_bitwidth // 8 * ALIGN)

    o_column, o_pair = tl.arange(0, 2 * PAIRS), i_block * PAIRS + tl.arange(0, PAIRS)
    if INTERLEAVED:
        o_channel = i_block * (2 * PAIRS) + o_column
        m_channel = o_channel < H.dim
    else:
        o_both = i_block * PAIRS + o_column % PAIRS
        o_first, o_second = _channels_of(o_both, H.dim, H.rotary_dim)
        o_channel = tl.where(o_column < PAIRS, o_first, o_second)
        o_channel = tl.max_contiguous(tl.multiple_of(o_channel, RUN), RUN)
        m_channel = (o_both < NUM_PAIRS) & (o_channel < H.dim)
    o_coefficient = tl.arange(0, COEFFICIENTS)
    p_rows = p_matrix + (o_coefficient * stride_row)[:, None] + o_channel[None, :]
    if IS_TRANSPOSED:
        p_integers += (o_coefficient * stride_token)[:, None] + o_token[None, :]
        m_within = (o_token < stride_token)[None, :]
        b_sum = tl.zeros((2 * PAIRS, TOKENS), dtype=tl.float32)
    else:
        p_integers += (o_coefficient * stride_token)[None, :] + o_token[:, None]
        m_within = (o_token < stride_token)[:, None]
        b_sum = tl.zeros((TOKENS, 2 * PAIRS), dtype=tl.float32)
    for i_coefficient in range(0, num_coefficients, COEFFICIENTS):
        m_c = o_coefficient < num_coefficients - i_coefficient
        m_rows = m_c[:, None] if IS_FULL else m_c[:, None] & m_channel[None, :]
        b_matrix = tl.load(p_rows, mask=m_rows, other=0.0).to(FACTOR)
        # Masked tokens are not stored, and for masked coefficients the matrix has zeros: no default is needed.
        if IS_TRANSPOSED:
            b_n = _centred(tl.load(p_integers, mask=m_c[:, None] & m_within), FACTOR)
            b_sum = tl.dot(tl.trans(b_matrix), b_n, b_sum)
        else:
            b_n = _centred(tl.load(p_integers, mask=m_c[None, :] & m_within), FACTOR)
            b_sum = tl.dot(b_n, b_matrix, b_sum)
        p_integers += COEFFICIENTS * stride_token
        p_rows += COEFFICIENTS * stride_row
    if IS_TRANSPOSED:
        b_sum = tl.trans(b_sum)

    m_token = o_token < num_tokens
    p_exponents = tl.load(p_row + F.data) + 4 * tl.load(p_row + F.exact)
    b_exponent = tl.load(p_exponents.to(tl.pointer_type(tl.uint8)) + o_token, mask=m_token, other=0).to(tl.int32)
    b_scale = tl.load(tl.load(p_row + F.scales).to(tl.pointer_type(tl.float32)) + b_exponent)
    p_mean = tl.load(p_row + F.mean).to(tl.pointer_type(tl.float32)) + i_first
    b_sum = b_sum * b_scale[:, None] + tl.load(p_mean + o_channel, mask=m_channel, other=0.0)[None, :]
    if INTERLEAVED:
        b_first, b_second = b_sum.reshape(TOKENS, PAIRS, 2).split()
    else:
        b_first, b_second = b_sum.reshape(TOKENS, 2, PAIRS).permute(0, 2, 1).split()
    if H.rotary_dim > 0:
        m_turned = (o_pair < H.rotary_dim // 2)[None, :]
        p_cos = tl.load(p_row + F.rotations).to(tl.pointer_type(tl.float32))
        if MIXED:
            i_rotation = tl.load(p_row + F.outputs + 2 * LAYERS + i_layer_head // HEADS)
            p_cos += i_rotation * (num_tokens * H.rotary_dim)
        p_cos += (o_token.to(tl.int64) * H.rotary_dim)[:, None] + o_pair[None, :]
        b_cos = tl.load(p_cos, mask=m_token[:, None] & m_turned, other=1.0)
        b_sin = tl.load(p_cos + H.rotary_dim // 2, mask=m_token[:, None] & m_turned, other=0.0)
        b_turned = b_first * b_cos - b_second * b_sin
        b_second = b_second * b_cos + b_first * b_sin
        b_first = b_turned
    b_first = stored_values(_bounded(b_first, LARGEST), p_output.dtype.element_ty, MANTISSA)
    b_second = stored_values(_bounded(b_second, LARGEST), p_output.dtype.element_ty, MANTISSA)
    b_slot = slots_of(p_row, p_slots, num_slots, o_token, m_token, page_size, F)
    p_rows, m_token = p_output + (b_slot * H.slot)[:, None], (b_slot >= 0)[:, None]
    if INTERLEAVED:
        b_both = tl.join(b_first, b_second).reshape(TOKENS, 2 * PAIRS)
        tl.store(p_rows + o_channel[None, :], b_both, mask=m_token & m_channel[None, :])
    else:
        o_first, o_second = _channels_of(o_pair, H.dim, H.rotary_dim)
        m_first = o_pair < NUM_PAIRS
        tl.store(p_rows + o_first[None, :], b_first, mask=m_token & m_first[None, :])
        tl.store(p_rows + o_second[None, :], b_second, mask=m_token & (m_first & (o_second < H.dim))[None, :])


@jit
def _centred(b_integer, FACTOR: tl.constexpr):
    """Return ``integer - 128``, which is exact."""
    return (b_integer ^ 128).to(tl.int8, bitcast=True).to(tl.float32).to(FACTOR)


@jit
def _bounded(b_x, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(b_x, -LARGEST), LARGEST)


@jit
def exact_tokens_kernel(
    p_table,
    p_slots,
    num_slots,
    page_size,
    most_exact,
    LAYERS: tl.constexpr,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
):
    """Each program restores one exact token in all layers. It joins byte planes as ``quant.base`` does."""
    i_exact = tl.program_id(0) % most_exact
    p_row = p_table + tl.program_id(0) // most_exact * (F.outputs + 3 * LAYERS)
    if i_exact >= tl.load(p_row + F.exact):
        return
    p_data = tl.load(p_row + F.data)
    i_token = tl.load(p_data.to(tl.pointer_type(tl.int32)) + i_exact)
    i_slot = slots_of(p_row, p_slots, num_slots, i_token, i_token >= 0, page_size, F)
    if i_slot < 0:
        return
    num_layers, num_channels = tl.load(p_row + F.layers), tl.load(p_row + F.channels)
    p_bytes = p_data + 4 * tl.load(p_row + F.exact) + tl.load(p_row + F.tokens)
    p_bytes = p_bytes.to(tl.pointer_type(tl.uint8)) + i_exact * (num_channels * ITEMSIZE)
    for i_layer in range(0, num_layers):
        p_k = p_bytes + i_layer * (HEADS * K.dim)
        _copy_heads(p_k, p_row + F.outputs + i_layer, i_slot, num_channels, HEADS, K, DTYPE, ITEMSIZE)
        p_v = p_bytes + num_layers * (HEADS * K.dim) + i_layer * (HEADS * V.dim)
        _copy_heads(p_v, p_row + F.outputs + LAYERS + i_layer, i_slot, num_channels, HEADS, V, DTYPE, ITEMSIZE)


@jit
def _copy_heads(
    p_bytes, p_output, i_slot, num_channels, HEADS: tl.constexpr, H: tl.constexpr, DTYPE: tl.constexpr,
    ITEMSIZE: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = H.block
    o_channel = tl.arange(0, BLOCK)
    m_channel = o_channel < HEADS * H.dim
    b_value = tl.zeros((BLOCK,), dtype=tl.uint32)
    for i_plane in tl.static_range(ITEMSIZE):
        b_byte = tl.load(p_bytes + i_plane * num_channels + o_channel, mask=m_channel, other=0)
        b_value |= b_byte.to(tl.uint32) << (8 * i_plane)
    b_value = (b_value >> 1) | (b_value << (8 * ITEMSIZE - 1))  # undo the rotation of ``quant.base``
    p_output = tl.load(p_output).to(tl.pointer_type(DTYPE)) + i_slot * H.slot
    tl.store(p_output + o_channel // H.dim * H.head + o_channel % H.dim, b_value.to(DTYPE), mask=m_channel)
