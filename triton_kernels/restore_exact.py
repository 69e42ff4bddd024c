"""restore_exact: join the byte planes of cells of `exact` into slots of the K and V buffers, any number of cells a
launch. Every bit is what was stored, whatever value it belongs to.

A cell has a plane for each byte of a value, of K and then of V: ``(tokens, layers, heads, dim)`` each, of values whose
bits are rotated left by one (``quant.base.to_planes``). A plane is what `ans_decode` made of its bitstream, or lies as
it was stored: mantissas are noise, and are not coded.

A launch has a *table*, a row of numbers a cell, as that of `restore_klt`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from sgl_kvfetch.codec import PLANES, read_tables
from sgl_kvfetch.codec.bitstream.ans import AnsTablesCodec
from sgl_kvfetch.codec.quant.base import to_planes
from sgl_kvfetch.triton_kernels.ans import DECODING_TABLE_BYTES, FittedChunk, fitted_decode_table
from sgl_kvfetch.triton_kernels.runtime import (
    COMPILE_OPTIONS,
    INTEGERS,
    jit,
    next_power_of_2,
    on_device,
    require_buffers,
    slots_of,
    table_on,
    tl,
)

ALIGNMENT = 16  # of planes in memory, in bytes
_TOKENS = 16  # of a program


class _Heads(NamedTuple):
    """The heads of K or V: a constant of the kernel."""

    dim: int
    slot: int  # strides of a buffer, in values
    head: int
    block: int  # a power of two that holds a head


class ExactShape(NamedTuple):
    """What all cells of a launch have in common: a constant of the kernel."""

    layers: int  # of the largest cell
    itemsize: int  # of a value
    align: int  # divides dims, strides and addresses of buffers, in values
    k: _Heads
    v: _Heads

    @property
    def row_bytes(self) -> int:
        """The size of a cell's row in a table."""
        return 8 * (_fields(self.itemsize).outputs + 2 * self.layers)


class _Fields(NamedTuple):
    """The position of each field in a table's row, in words of 8 bytes: a constant of the kernel."""

    tokens: int  # number
    pages: int  # address of the page table
    planes: int  # addresses of K's planes, then of V's
    layers: int  # number
    heads: int  # number
    outputs: int  # addresses of K's layers, then of V's, as many as the largest cell has


def _fields(itemsize: int) -> _Fields:
    return _Fields(0, 1, 2, *range(2 + 2 * itemsize, 5 + 2 * itemsize))


def exact_shape(k: Sequence[torch.Tensor], v: Sequence[torch.Tensor], layers: int) -> ExactShape:
    """Return the shape of cells in these buffers, whatever heads they have. ``k``, ``v``: one a layer, ``(num_slots,
    heads, dim)``, of which only dim must be contiguous. ``layers``: of the largest cell. Raises ValueError for buffers
    that differ."""
    align, heads = ALIGNMENT, []
    for buffers in (k, v):
        require_buffers(buffers)
        dim = buffers[0].shape[2]
        heads.append(_Heads(dim, *buffers[0].stride()[:2], next_power_of_2(dim)))
        align = math.gcd(align, *heads[-1][:3], *(x.data_ptr() // x.itemsize for x in buffers))
    return ExactShape(layers, k[0].itemsize, align, *heads)


def outputs_of(shape: ExactShape, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> bytes:
    """Return the part of a cell's row that its layers and heads decide. ``k``, ``v``: the buffers of its layers,
    reduced to its heads."""
    room = (0,) * (shape.layers - len(k))
    addresses = (*(x.data_ptr() for x in k), *room, *(x.data_ptr() for x in v), *room)
    return array("q", (len(k), k[0].shape[1], *addresses)).tobytes()


def exact_rows(shape: ExactShape, cells: Mapping[str, np.ndarray], outputs: Sequence[bytes]) -> np.ndarray:
    """Return the rows of cells, int64 ``(cells, row_bytes / 8)``. ``cells``: by name, int64 ``(cells,)``: ``tokens``;
    ``pages``, the address of the page table; and ``outputs``, an index into the argument of this name. ``planes``:
    addresses, ``(cells, 2 * itemsize)``, multiples of `ALIGNMENT`."""
    at = _fields(shape.itemsize)
    rows = np.empty((len(cells["tokens"]), shape.row_bytes // 8), dtype=np.int64)
    rows[:, at.tokens], rows[:, at.pages], rows[:, at.planes : at.layers] = (
        cells[name] for name in ("tokens", "pages", "planes")
    )
    rows[:, at.layers :] = np.frombuffer(b"".join(outputs), np.int64).reshape(len(outputs), -1)[cells["outputs"]]
    return rows


def launch_exact(
    shape: ExactShape, rows: torch.Tensor, slots: torch.Tensor, page_size: int, most_tokens: int, most_heads: int
) -> None:
    """Restore cells of up to ``most_tokens`` tokens and ``most_heads`` heads, on the current stream. ``rows``: those of
    `exact_rows`, on the device. A launch reads nothing else of the cells. ``slots``: as for `restore_klt`."""
    num_blocks = -(-most_tokens // _TOKENS)
    with on_device(slots.device):
        restore_exact_kernel[(len(rows) * 2 * shape.layers * most_heads * num_blocks,)](
            rows,
            slots,
            slots.numel(),
            page_size,
            num_blocks,
            most_heads,
            LAYERS=shape.layers,
            ITEMSIZE=shape.itemsize,
            ALIGN=shape.align,
            K=shape.k,
            V=shape.v,
            F=_fields(shape.itemsize),
            DTYPE=INTEGERS[shape.itemsize],
            TOKENS=_TOKENS,
            **COMPILE_OPTIONS,
        )


@jit
def restore_exact_kernel(
    p_table,  # (cells, row)
    p_slots,  # (num_slots,)
    num_slots,
    page_size,
    num_blocks,
    most_heads,
    LAYERS: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ALIGN: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    F: tl.constexpr,
    DTYPE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Each program joins TOKENS tokens of one head of one layer, of K or V."""
    i_block, i_head = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    i_layer, i_head = i_head // most_heads, i_head % most_heads
    p_row = p_table + i_layer // (2 * LAYERS) * (F.outputs + 2 * LAYERS)
    i_layer = i_layer % (2 * LAYERS)
    is_k = i_layer < LAYERS
    i_output, i_layer = i_layer, i_layer % LAYERS
    num_layers, num_heads = tl.load(p_row + F.layers).to(tl.int32), tl.load(p_row + F.heads).to(tl.int32)
    num_tokens = tl.load(p_row + F.tokens).to(tl.int32)
    if (i_layer >= num_layers) | (i_head >= num_heads) | (i_block * TOKENS >= num_tokens):
        return
    o_token = i_block * TOKENS + tl.arange(0, TOKENS)
    b_slot = slots_of(p_row, p_slots, num_slots, o_token, o_token < num_tokens, page_size, F)
    o_row = (o_token * num_layers + i_layer) * num_heads + i_head
    p_output = tl.load(p_row + F.outputs + i_output).to(tl.pointer_type(DTYPE))
    # Two calls, since dims and strides are constants, and those of K and V may differ.
    if is_k:
        _join(p_row + F.planes, p_output, b_slot, o_row, i_head, K, ITEMSIZE, ALIGN)
    else:
        _join(p_row + F.planes + ITEMSIZE, p_output, b_slot, o_row, i_head, V, ITEMSIZE, ALIGN)


@jit
def _join(
    p_planes,  # addresses of planes, (rows, dim) each
    p_output,  # (num_slots, heads, dim)
    b_slot,
    o_row,
    i_head,
    H: tl.constexpr,
    ITEMSIZE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Join the planes' bytes of some tokens in one head, and write them to their slots."""
    BLOCK: tl.constexpr = H.block
    o_dim = tl.arange(0, BLOCK)
    m_value = (b_slot >= 0)[:, None] & (o_dim < H.dim)[None, :]
    o_value = (o_row * H.dim)[:, None] + o_dim[None, :]
    b_value = tl.zeros((b_slot.shape[0], BLOCK), dtype=tl.uint32)
    # A table can name planes at any multiple of 16: the compiler must be told, or it loads byte by byte.
    for i_plane in tl.static_range(ITEMSIZE):
        p_plane = tl.multiple_of(tl.load(p_planes + i_plane).to(tl.pointer_type(tl.uint8)), 16)
        b_value |= tl.load(p_plane + o_value, mask=m_value, other=0).to(tl.uint32) << (8 * i_plane)
    b_value = (b_value >> 1) | (b_value << (8 * ITEMSIZE - 1))  # undo the rotation of ``quant.base``
    p_output = tl.multiple_of(p_output + i_head * H.head, ITEMSIZE * ALIGN)
    tl.store(
        p_output + (b_slot * H.slot)[:, None] + o_dim[None, :], b_value.to(p_output.dtype.element_ty), mask=m_value
    )


def coded_planes(planes: Sequence[torch.Tensor]) -> tuple[bytes, bytes, list[FittedChunk]]:
    """Code planes, uint8 ``(tokens, 3, heads, dim)``, in `ans-tables`. Return the bitstreams, the distributions, and
    where both are. The first bitstream is at an odd address."""
    data, slots, chunks, num_tables, num_bytes = b"?", b"", list[FittedChunk](), 0, 0
    for plane in planes:
        found, coded = read_tables(AnsTablesCodec().encode(plane.view(len(plane), 3, 1, -1)))
        rows = plane[0].numel()
        where = len(slots), len(found), num_tables
        chunks.append(FittedChunk(len(data), len(coded), rows, len(plane), num_bytes, rows, *where))
        data, slots, num_tables = data + bytes(coded), slots + found.tobytes(), num_tables + len(found)
        num_bytes += -(-plane.numel() // ALIGNMENT) * ALIGNMENT
    return data, slots, chunks


_TRIAL_TOKENS, _SPARE_SLOTS = 160, 16
_STORED = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes


def fault_on_gpu(device: torch.device, shape: ExactShape | None = None) -> str:
    """Decode and restore a made-up cell of one head on a device: random bits, in scattered slots, without one token.
    Return what is wrong; an empty string if nothing is. Waits for the device. Its launches go to the current stream,
    and write to no KV buffer. Raises what a compiler and a driver raise. ``shape``: by default, of bfloat16."""
    if shape is None:
        any_buffers = [torch.empty((1, 1, 128), dtype=torch.bfloat16, device=device)]
        shape = exact_shape(any_buffers, any_buffers, PLANES)
    generator, dtype = torch.Generator().manual_seed(0), _STORED[shape.itemsize]
    num_slots = _TRIAL_TOKENS + _SPARE_SLOTS
    slots = torch.randperm(num_slots, generator=generator)[:_TRIAL_TOKENS]
    slots[1] = -1  # a token that is not loaded: its values must go nowhere
    is_there, planes, expected, buffers = slots >= 0, list[torch.Tensor](), list[torch.Tensor](), list[torch.Tensor]()
    for side in (shape.k, shape.v):
        size = _TRIAL_TOKENS, shape.layers, 1, side.dim * shape.itemsize
        values = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)
        planes += to_planes(values)
        for layer in range(shape.layers):
            memory = torch.zeros(num_slots * side.slot, dtype=dtype, device=device)
            buffers.append(memory.as_strided((num_slots, *values.shape[2:]), (side.slot, side.head, 1)))
            expected.append(torch.zeros(buffers[-1].shape, dtype=dtype))
            expected[-1][slots[is_there]] = values[is_there, layer]
    data, distributions, chunks = coded_planes(planes)
    data, distributions = (torch.frombuffer(bytearray(x), dtype=torch.uint8).to(device) for x in (data, distributions))
    out = torch.empty(chunks[-1].out_start + planes[-1].numel(), dtype=torch.uint8, device=device)
    num_tables = chunks[-1].first_table + chunks[-1].num_tables
    tables = torch.empty(num_tables * DECODING_TABLE_BYTES // 4, dtype=torch.int32, device=device)
    status = torch.zeros(len(chunks), dtype=torch.int32, device=device)
    fitted_decode_table(data, table_on(chunks, device), _TRIAL_TOKENS, distributions, tables, out, status)
    pages = torch.arange(_TRIAL_TOKENS, dtype=torch.int32, device=device)  # of one token
    cells = {
        "tokens": np.array([_TRIAL_TOKENS]),
        "pages": np.array([pages.data_ptr()]),
        "planes": np.array([[out.data_ptr() + chunk.out_start for chunk in chunks]]),
        "outputs": np.array([0]),
    }
    outputs = outputs_of(shape, buffers[: shape.layers], buffers[shape.layers :])
    rows = torch.from_numpy(exact_rows(shape, cells, [outputs])).to(device)
    launch_exact(shape, rows, slots.to(device), 1, _TRIAL_TOKENS, 1)
    if bool(status.any()):
        return "a trial's bitstream of ans-tables does not decode"
    is_right = all(torch.equal(x.cpu(), y) for x, y in zip(buffers, expected, strict=True))
    return "" if is_right else "a trial gave other values"
