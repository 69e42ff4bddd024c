"""quantise_klt: turn the values of many cells, in slots of the KV buffers, into the integers of `klt`.

This does what ``KltQuantiser.quantise`` does on the CPU. A kernel undoes the rotation and subtracts the mean, torch
multiplies matrices, and a second kernel chooses each token's step and rounds. Sums are in another order than on the
CPU, but in float32 as there. So a coefficient in the middle between two integers may become the other one, and a token
may have the next step.

What launches need of cells does not change, and is in tables on the device. So a launch takes many cells, uploads
nothing, and costs the host the same whatever their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch

from sgl_kvfetch.codec.quant.klt import KltForward
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels.restore_klt import EXACT
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    FP8_MANTISSA,
    STORED,
    jit,
    load_values,
    next_power_of_2,
    on_device,
    require,
    require_buffers,
    require_scalable,
    require_tensor,
    round_float32,
    tl,
    triton,
    use_kernels,
)

NOT_FINITE = 255  # instead of an exponent: the token has a value that is infinite or not a number
_TOKENS = 16  # of one program
_CHANNELS = 128  # rounded in one step of a loop
_ALIGNMENT = 16  # of channels, in values
_TO_WHOLE = 1.5 * 2**23  # added and subtracted: rounds magnitudes up to 2^22, ties to even
_SCRATCH_BYTES = 96 << 20  # of temporary tensors of the cells of one launch, unless a single cell needs more


class KltInput(NamedTuple):
    """A cell to quantise. ``k`` and ``v``: each layer's buffer, ``(num_slots, heads, dim)`` of the cell's heads, on the
    device. ``forward`` is on the host."""

    forward: KltForward
    k: Sequence[torch.Tensor]
    v: Sequence[torch.Tensor]

    @property
    def num_channels(self) -> int:
        return len(self.forward.mean)

    @property
    def num_norms(self) -> int:
        return sum(len(x) * x[0].shape[1] for x in (self.k, self.v))


class _HeadRow(NamedTuple):
    """The row of a table for one head of one layer, of K or V."""

    buffer: int  # address
    mean: int  # address
    before: int  # channels of all cells before this one
    channels: int  # of the cell
    channel: int  # the head's first in the cell
    norm: int  # the head's number among all cells' norms
    turn: int  # which rotation K has


class _CellRow(NamedTuple):
    """The row of a table for a cell. The first five are addresses."""

    inverse_spread: int
    sensitivity: int
    limits: int
    bits: int
    high: int
    kept: int  # number of coefficients
    norm: int  # the cell's first among all cells' norms
    row: int  # of the cell's first integer in the output


_H, _C = _HeadRow(*range(len(_HeadRow._fields))), _CellRow(*range(len(_CellRow._fields)))


@dataclass(frozen=True, eq=False)
class _Group:
    """Consecutive cells whose matrices have one shape: ``(cells, C, C)``, from channels to coefficients."""

    cells: range
    matrix: torch.Tensor


class KltCells:
    """Cells of a pool, with all that kernels need of them, on the device.

    A token's output is an exponent for each cell, and then the integers of each cell.

    Attributes:
        num_rows: The number of integers of a token, by cell.
        output_rows: The number of exponents and integers of a token.
    """

    def __init__(self, inputs: Sequence[KltInput], upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """``upload`` copies a tensor to the buffers' device, and waits for it.

        Raises:
            ValueError: tensors that do not fit together. All buffers of K, and all of V, must have equal heads, strides
                and dtype.
            UnsupportedError: a dtype without scales, or neither a GPU with Triton nor Triton's interpreter.
        """
        self._first = inputs[0]
        for side in ([x for each in inputs for x in each.k], [x for each in inputs for x in each.v]):
            require_buffers(side)
            require_scalable(side[0].dtype)
        self.device = self._sides[0].device
        if not use_kernels(self.device):
            raise UnsupportedError(f"quantise_klt needs Triton's interpreter for tensors on {self.device}")
        for each in inputs:
            _require_fitting(each)
        self._num_rotations = 1 + max(turn for each in inputs for turn in each.forward.turns)
        self.num_rows = tuple(each.forward.num_rows for each in inputs)
        self.output_rows = len(inputs) + sum(self.num_rows)
        self._inverse_steps = upload(self._first.forward.inverse_steps)
        self._align = math.gcd(*(n for x in self._sides for n in (x.shape[2], *x.stride()[:2])), _ALIGNMENT)
        self._channels, self._norms = ([0, *accumulate(x)] for x in zip(*map(_sizes, inputs), strict=True))
        self._heads = [[0, *accumulate(len(x) * x[0].shape[1] for x in side)] for side in _sides_of(inputs)]
        self._groups: list[_Group] = []
        self._tables: list[torch.Tensor] = []
        self._upload(inputs, upload)

    @property
    def _sides(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A buffer of K, and one of V: all are alike."""
        return self._first.k[0], self._first.v[0]

    def _upload(self, inputs: Sequence[KltInput], upload: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Put the tables of cells and heads on the device, with the tensors that they point to. Equal cells share a
        matrix."""
        cell_rows: list[_CellRow] = []
        head_rows: tuple[list[_HeadRow], list[_HeadRow]] = ([], [])
        rows = list(accumulate(self.num_rows, initial=len(inputs)))
        self._kept: list[torch.Tensor] = []  # what the tables point to
        for _, some in groupby(range(len(inputs)), lambda i: _sizes(inputs[i])):
            cells = list(some)
            matrix, *others = (upload(torch.stack([getattr(inputs[i].forward, x) for i in cells])) for x in _TENSORS)
            self._groups.append(_Group(range(cells[0], cells[-1] + 1), matrix))
            self._kept += others
            for number, i in enumerate(cells):
                mean, *addresses = (x[number].data_ptr() for x in others)
                cell_rows.append(_CellRow(*addresses, inputs[i].forward.kept, self._norms[i], rows[i]))
                channel, norm = 0, self._norms[i]
                for buffers, of_side in zip((inputs[i].k, inputs[i].v), head_rows, strict=True):
                    _, heads, dim = buffers[0].shape
                    for buffer, turn in zip(buffers, inputs[i].forward.turns, strict=True):
                        for head in range(heads):
                            place = self._channels[i], inputs[i].num_channels, channel, norm, turn
                            of_side.append(_HeadRow(buffer[:, head].data_ptr(), mean + 4 * channel, *place))
                            channel, norm = channel + dim, norm + 1
        self._tables = [upload(torch.tensor(x, dtype=torch.int64)) for x in (*head_rows, cell_rows)]

    def _batches(self, num_tokens: int) -> Iterator[range]:
        """Yield the cells of each launch."""
        token_bytes = self._groups[0].matrix.itemsize + 4  # of a channel: before the product and after
        most_channels = max(1, _SCRATCH_BYTES // (token_bytes * num_tokens))
        first = 0
        for cell in range(len(self.num_rows)):
            if cell > first and self._channels[cell + 1] - self._channels[first] > most_channels:
                yield range(first, cell)
                first = cell
        yield range(first, len(self.num_rows))

    def quantise(
        self, slots: torch.Tensor, rotations: torch.Tensor | None, num_sinks: int, output: torch.Tensor
    ) -> None:
        """Quantise tokens of all cells. This does not wait for the device. All work is on the current stream.

        Tokens that must be kept exact have the exponent 0, and tokens with a value that is not finite ``NOT_FINITE``;
        the integers of both are 128.

        Args:
            slots: int64 ``(tokens,)``, none negative.
            rotations: float32 ``(rotations, tokens, rotary_dim)``, cosines, then sines, of K's positions, divided by
                the square of a rotation's ``attention_scaling``. Each layer's is undone. None without any.
            num_sinks: The first tokens that are kept exact.
            output: uint8 ``(output_rows, tokens)``.

        Raises:
            ValueError: tensors that do not fit together.
        """
        num_tokens = len(slots)
        for side in self._sides:
            require_buffers([side], slots)
        require_tensor("output", output, torch.uint8, (self.output_rows, num_tokens), self.device)
        if rotations is not None:
            found, rotary_dim, dim = len(rotations), rotations.shape[-1], self._sides[0].shape[2]
            require_tensor("rotations", rotations, torch.float32, (found, num_tokens, rotary_dim), self.device)
            require(found >= self._num_rotations, lambda: f"{found} rotations, expected {self._num_rotations} or more")
            require(rotary_dim <= dim, lambda: f"rotation of {rotary_dim} of {dim} values")
        if num_tokens == 0:
            return
        with on_device(self.device):
            for cells in self._batches(num_tokens):
                self._launch(cells, slots, rotations, num_sinks, output)

    def _launch(
        self, cells: range, slots: torch.Tensor, rotations: torch.Tensor | None, num_sinks: int, output: torch.Tensor
    ) -> None:
        """Launch the kernels for a range of cells: centre and rotate, multiply, round."""
        num_tokens, num_blocks = len(slots), triton.cdiv(len(slots), _TOKENS)
        first_channel, end_channel = (self._channels[i] for i in (cells.start, cells.stop))
        first_norm, end_norm = (self._norms[i] for i in (cells.start, cells.stop))
        matrix_type = self._groups[0].matrix.dtype
        centred = torch.empty((end_channel - first_channel) * num_tokens, dtype=matrix_type, device=self.device)
        log_norms = torch.empty((end_norm - first_norm, num_tokens), dtype=torch.float32, device=self.device)
        pairs = 0 if rotations is None else rotations.shape[2] // 2
        *head_tables, cell_table = self._tables
        for buffer, table, starts, turned in zip(self._sides, head_tables, self._heads, (pairs, 0), strict=True):
            first_head, end_head = (starts[i] for i in (cells.start, cells.stop))
            centre_kernel[(num_blocks * (end_head - first_head),)](
                *(table, slots, centred if rotations is None else rotations, centred, log_norms),
                *(num_tokens, num_blocks, first_head, first_channel, first_norm),
                F=_H,
                FIELDS=len(_H),
                DTYPE=STORED[buffer.dtype],
                MANTISSA=FP8_MANTISSA.get(buffer.dtype, 0),
                DIM=buffer.shape[2],
                SLOT=buffer.stride(0),
                PAIRS=turned,
                INTERLEAVED=self._first.forward.interleaved,
                ALIGN=self._align,
                TOKENS=_TOKENS,
                BLOCK=next_power_of_2(buffer.shape[2]),
                **COMPILE_OPTIONS,
            )
        for group in self._groups:
            some = range(max(cells.start, group.cells.start), min(cells.stop, group.cells.stop))
            if not some:
                continue
            begin, end = ((self._channels[i] - first_channel) * num_tokens for i in (some.start, some.stop))
            num_channels = group.matrix.shape[1]
            mine = slice(some.start - group.cells.start, some.stop - group.cells.start)
            product = _product(centred[begin:end].view(len(some), num_tokens, num_channels), group.matrix[mine])
            round_kernel[(num_blocks * len(some),)](
                *(cell_table, product, log_norms, self._inverse_steps, output),
                *(num_tokens, num_blocks, some.start, num_channels),
                *(self._norms[some.start + 1] - self._norms[some.start], first_norm, num_sinks),
                F=_C,
                FIELDS=len(_C),
                ROUNDED=STORED[matrix_type],
                ALIGN=self._align,
                TOKENS=_TOKENS,
                CHANNELS=_CHANNELS,
                TO_WHOLE=_TO_WHOLE,
                PER_EXPONENT=-1 / math.log(2),
                EXACT=EXACT,
                NOT_FINITE=NOT_FINITE,
                **COMPILE_OPTIONS,
            )


_TENSORS = KltForward._fields[:7]  # whose first is the matrix, and whose others `_CellRow` and `_HeadRow` point to


def _sizes(cell: KltInput) -> tuple[int, int]:
    return cell.num_channels, cell.num_norms


def _sides_of(inputs: Sequence[KltInput]) -> tuple[list[Sequence[torch.Tensor]], list[Sequence[torch.Tensor]]]:
    return [each.k for each in inputs], [each.v for each in inputs]


def _require_fitting(cell: KltInput) -> None:
    """Raise ValueError unless the transform is for as many channels as the buffers have."""
    found, expected = cell.num_channels, sum(len(x) * x[0].shape[1] * x[0].shape[2] for x in (cell.k, cell.v))
    require(found == expected, lambda: f"{found} channels, expected {expected} for these buffers")
    turns = cell.forward.turns
    require(len(turns) == len(cell.k) == len(cell.v), lambda: f"{len(cell.k)} layers, expected {len(turns)}")
    for name, size in (("matrix", (found, found)), ("sensitivity", (found + cell.num_norms + 1,))):
        x = getattr(cell.forward, name)
        require_tensor(name, x, x.dtype, size, cell.forward.mean.device)


def _product(centred: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return the cells' products in float32, ``(cells, tokens, C)``. They are rounded to the matrices' type later, and
    so once, as on the CPU.

    ``centred @ matrix`` would not do in bfloat16: by default, torch permits cuBLAS to split a sum, to round the parts
    to bfloat16, and to add them in bfloat16, which suits few tokens and many channels. In a simulation, that gave 2 to
    3% other integers. If the result is in float32, no part is rounded to anything less. A flag forbids it, too, but for
    the whole process, which is SGLang's. In float32 there is nothing to forbid, unless SGLang's option
    ``--enable-tf32-matmul`` is on: then a caller's trial decides.
    """
    if matrix.dtype == torch.float32:
        return torch.bmm(centred, matrix)
    if centred.device.type == "cpu":  # in Triton's interpreter: torch has such a product on devices alone
        return torch.bmm(centred.float(), matrix.float())
    return torch.bmm(centred, matrix, out_dtype=torch.float32)


@jit
def centre_kernel(
    p_heads,  # (heads, fields): `_HeadRow`, those of all cells
    p_slots,  # (tokens,)
    p_rotations,  # (rotations, tokens, 2 * PAIRS)
    p_centred,  # of each cell (tokens, channels)
    p_log_norms,  # (norms, tokens)
    num_tokens,
    num_blocks,
    first_head,  # of the launch's cells, counted over all cells, as the next two
    first_channel,
    first_norm,
    F: tl.constexpr,
    FIELDS: tl.constexpr,
    DTYPE: tl.constexpr,
    MANTISSA: tl.constexpr,
    DIM: tl.constexpr,
    SLOT: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program handles TOKENS tokens of one head of one layer of one cell, of K or V. The logarithm of a norm is
    NaN if a value is not finite."""
    i_block, i_head = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    p_head = p_heads + (first_head + i_head) * FIELDS
    o_token, o_dim = i_block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK)
    m_token, m_dim = o_token < num_tokens, o_dim < DIM
    m_both = m_token[:, None] & m_dim[None, :]
    p_buffer = tl.load(p_head + F.buffer).to(tl.pointer_type(DTYPE))
    p_buffer = tl.multiple_of(p_buffer, DTYPE.primitive_bitwidth // 8 * ALIGN)
    p_buffer += (tl.load(p_slots + o_token, mask=m_token, other=0) * SLOT)[:, None]
    b_x = load_values(p_buffer + o_dim[None, :], m_both, MANTISSA)
    b_squares = tl.minimum(tl.maximum(tl.sum(b_x * b_x, axis=1), 1e-12), 3e38)
    b_log_norm = tl.log(b_squares) * 0.5 + tl.sum(b_x * 0.0, axis=1)
    p_log_norm = p_log_norms + (tl.load(p_head + F.norm) - first_norm) * num_tokens
    tl.store(p_log_norm + o_token, b_log_norm, mask=m_token)
    if PAIRS > 0:
        if INTERLEAVED:
            o_pair, o_other, m_first = o_dim // 2, o_dim ^ 1, o_dim % 2 == 0
        else:
            o_pair, o_other, m_first = o_dim % PAIRS, (o_dim + PAIRS) % (2 * PAIRS), o_dim < PAIRS
        m_turned = m_token[:, None] & (o_dim < 2 * PAIRS)[None, :]
        b_other = load_values(p_buffer + o_other[None, :], m_turned, MANTISSA)
        p_rotations += tl.load(p_head + F.turn) * (num_tokens * (2 * PAIRS))
        p_cos = p_rotations + (o_token * (2 * PAIRS))[:, None] + o_pair[None, :]
        b_cos = tl.load(p_cos, mask=m_turned, other=1.0)
        b_sin = tl.load(p_cos + PAIRS, mask=m_turned, other=0.0)
        b_x = b_x * b_cos + tl.where(m_first[None, :], b_other, -b_other) * b_sin
    p_mean = tl.multiple_of(tl.load(p_head + F.mean).to(tl.pointer_type(tl.float32)), 4 * ALIGN)
    b_x -= tl.load(p_mean + o_dim, mask=m_dim, other=0.0)[None, :]
    # What divides these, the compiler is told.
    o_before = tl.multiple_of(tl.load(p_head + F.before) - first_channel, ALIGN)
    num_channels = tl.multiple_of(tl.load(p_head + F.channels), ALIGN)
    o_channel = tl.multiple_of(tl.load(p_head + F.channel), ALIGN)
    p_row = p_centred + o_before * num_tokens + (o_token * num_channels)[:, None] + o_channel
    tl.store(p_row + o_dim[None, :], round_float32(b_x, p_centred.dtype.element_ty), mask=m_both)


@jit
def _coefficients(p_product, o_channel, num_channels, ROUNDED: tl.constexpr):
    """Return coefficients, float32 ``(tokens, channels)``, as a product in the matrices' type has them."""
    m_channel = (o_channel < num_channels)[None, :]
    b_x = tl.load(p_product + o_channel[None, :], mask=m_channel, other=0.0)
    return round_float32(b_x, ROUNDED).to(tl.float32)


@jit
def _steps(p_product, b_inverse_step, o_channel, num_kept, num_channels, ROUNDED: tl.constexpr, TO_WHOLE: tl.constexpr):
    """Return coefficients in steps, ``(tokens, channels)``. Those that are kept are rounded to whole steps."""
    b_x = _coefficients(p_product, o_channel, num_channels, ROUNDED) * b_inverse_step[:, None]
    return tl.where((o_channel < num_kept)[None, :], b_x + TO_WHOLE - TO_WHOLE, b_x)


@jit
def round_kernel(
    p_cells,  # (cells, fields): `_CellRow`, those of all cells
    p_product,  # (cells, tokens, num_channels), of the launch
    p_log_norms,  # (norms, tokens), from number first_norm on
    p_inverse_steps,  # (256,), by exponent
    p_output,  # (rows, tokens): the exponents of all cells, then their integers
    num_tokens,
    num_blocks,
    first_cell,  # of the launch
    num_channels,
    num_norms,
    first_norm,
    num_sinks,
    F: tl.constexpr,
    FIELDS: tl.constexpr,
    ROUNDED: tl.constexpr,
    ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TO_WHOLE: tl.constexpr,
    PER_EXPONENT: tl.constexpr,
    EXACT: tl.constexpr,
    NOT_FINITE: tl.constexpr,
):
    """Each program handles TOKENS tokens of a cell. It adds up their costs, then checks whether integers can hold them,
    then writes the integers. What is read past the last token is not stored."""
    i_block, i_cell = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    p_cell = p_cells + (first_cell + i_cell) * FIELDS
    p_inverse_spread = tl.multiple_of(tl.load(p_cell + F.inverse_spread).to(tl.pointer_type(tl.float32)), 4 * ALIGN)
    p_sensitivity = tl.load(p_cell + F.sensitivity).to(tl.pointer_type(tl.float32))
    p_limits = tl.multiple_of(tl.load(p_cell + F.limits).to(tl.pointer_type(tl.float32)), 4 * ALIGN)
    p_bits = tl.multiple_of(tl.load(p_cell + F.bits).to(tl.pointer_type(tl.int32)), 4 * ALIGN)
    p_high = tl.multiple_of(tl.load(p_cell + F.high).to(tl.pointer_type(tl.int32)), 4 * ALIGN)
    num_kept = tl.load(p_cell + F.kept).to(tl.int32)
    o_token, o_c = i_block * TOKENS + tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    m_token = o_token < num_tokens
    num_channels = num_channels // ALIGN * ALIGN  # which tells the compiler what divides it
    o_row = i_cell.to(tl.int64) * num_tokens + tl.minimum(o_token, num_tokens - 1)
    p_product += (o_row * num_channels)[:, None]
    p_log_norms += (tl.load(p_cell + F.norm) - first_norm) * num_tokens
    b_cost = tl.zeros((TOKENS,), dtype=tl.float32) + tl.load(p_sensitivity + num_channels + num_norms)
    for i_norm in range(0, num_norms):
        b_log_norm = tl.load(p_log_norms + i_norm * num_tokens + o_token, mask=m_token, other=0.0)
        b_cost += b_log_norm * tl.load(p_sensitivity + num_channels + i_norm)
    for i_channel in range(0, num_channels, CHANNELS):
        o_channel = i_channel + o_c
        m_channel = o_channel < num_channels
        b_x = _coefficients(p_product, o_channel, num_channels, ROUNDED)
        b_x *= tl.load(p_inverse_spread + o_channel, mask=m_channel, other=0.0)[None, :]
        b_x = tl.minimum(tl.maximum(b_x, -8.0), 8.0)
        b_x *= tl.load(p_sensitivity + o_channel, mask=m_channel, other=0.0)[None, :]
        b_cost += tl.sum(b_x, axis=1)
    m_finite = b_cost == b_cost
    b_exponent = tl.where(m_finite, tl.minimum(tl.maximum(b_cost * PER_EXPONENT, -8.0), 8.0), 0.0)
    o_exponent = (b_exponent + TO_WHOLE - TO_WHOLE).to(tl.int32) + 128
    b_inverse_step = tl.load(p_inverse_steps + o_exponent)

    b_bad = tl.zeros((TOKENS,), dtype=tl.int32)
    for i_channel in range(0, num_channels, CHANNELS):
        o_channel = i_channel + o_c
        b_n = _steps(p_product, b_inverse_step, o_channel, num_kept, num_channels, ROUNDED, TO_WHOLE)
        b_limit = tl.load(p_limits + o_channel, mask=o_channel < num_channels, other=0.0)
        b_bad |= tl.max(tl.where(tl.abs(b_n) <= b_limit[None, :], 0, 1), axis=1)
    m_fits = m_finite & (b_bad == 0) & (o_token >= num_sinks)
    o_exponent = tl.where(m_fits, o_exponent, tl.where(m_finite, EXACT, NOT_FINITE))
    p_exponents = p_output + (first_cell + i_cell).to(tl.int64) * num_tokens
    tl.store(p_exponents + o_token, o_exponent.to(tl.uint8), mask=m_token)
    p_row = (p_output + tl.load(p_cell + F.row) * num_tokens) + o_token[:, None]
    for i_channel in range(0, num_kept, CHANNELS):
        o_channel = i_channel + o_c
        m_kept = o_channel < num_kept
        b_n = _steps(p_product, b_inverse_step, o_channel, num_kept, num_channels, ROUNDED, TO_WHOLE)
        b_n = tl.where(m_fits[:, None], b_n, 0.0).to(tl.int32)
        b_bits = tl.load(p_bits + o_channel, mask=m_kept, other=0)[None, :]
        b_half = (1 << b_bits) >> 1
        b_low = tl.where(b_bits > 0, ((b_n + b_half) & (2 * b_half - 1)) - b_half, b_n)
        m_both = m_token[:, None] & m_kept[None, :]
        tl.store(p_row + o_channel.to(tl.int64)[None, :] * num_tokens, (b_low + 128).to(tl.uint8), mask=m_both)
        o_high = tl.load(p_high + o_channel, mask=m_kept, other=0).to(tl.int64)[None, :]
        b_high = (b_n - b_low) >> b_bits
        tl.store(p_row + o_high * num_tokens, (b_high + 128).to(tl.uint8), mask=m_both & (b_bits > 0))
