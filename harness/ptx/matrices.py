"""Decodes instructions that move and multiply matrices. Threads of a warp, or of four warps, hold parts of each.

PTX's manual has the parts ("Matrix fragments"). A matrix of 8x8 has a row in four threads, two columns a thread.
``wgmma`` multiplies 64 rows, which are in registers or in shared memory, by columns in shared memory. A descriptor of
64 bits has a place there and how it is swizzled.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

from harness.ptx.program import Instruction
from harness.ptx.values import UNSIGNED, Values, float_of_bfloat, halves_of, joined, width_of

if TYPE_CHECKING:
    from harness.ptx.block import Act, Block, Kernel

_LANES = np.arange(32)
_ROWS, _COLS = _LANES // 4, 2 * (_LANES % 4)  # of a thread, in a matrix of 8x8
_SWIZZLED_BYTES = {0: 16, 1: 128, 2: 64, 3: 32}  # by a descriptor's highest bits
_SWIZZLED_BITS = {0: 0, 1: 7, 2: 3, 3: 1}


def decode(kernel: Kernel, instruction: Instruction) -> Act | None:
    op = instruction.op
    match op[0]:
        case "mov" if instruction.operands[0][0] == "{":
            return _split(kernel, instruction)
        case "ldmatrix":
            return _load(kernel, instruction)
        case "stmatrix":
            return _store(kernel, instruction)
        case "mma":
            return _multiply(kernel, instruction)
        case "wgmma" if op[1] == "mma_async":
            return _multiply_groups(kernel, instruction)
        case "wgmma" if op[1] == "commit_group":
            return lambda block, mask: block.shared.commit_products()
        case "wgmma" if op[1] == "wait_group":
            num_left = int(instruction.operands[-1])
            return lambda block, mask: block.shared.wait_products(num_left)
        case "wgmma" if op[1] == "fence":
            return lambda block, mask: None
    return None


def _split(kernel: Kernel, instruction: Instruction) -> Act:
    """``mov`` of a register into several smaller ones."""
    bits, writers = width_of(instruction.op[-1]), [kernel.writer(each) for each in instruction.parts(0)]
    read, part = kernel.reader(instruction.operands[1], bits), bits // len(writers)

    def act(block: Block, mask: Values) -> None:
        for index, put in enumerate(writers):
            put(block, (read(block) >> UNSIGNED[bits](index * part)).astype(UNSIGNED[part]), mask)

    return act


def _load(kernel: Kernel, instruction: Instruction) -> Act:
    """``ldmatrix``: the threads of each eighth give addresses of a matrix's rows."""
    writers, is_transposed = [kernel.writer(each) for each in instruction.parts(0)], "trans" in instruction.op
    address, num_warps = kernel.address_reader(instruction.operands[1], 32), kernel.num_threads // 32

    def act(block: Block, mask: Values) -> None:
        assert mask.all()
        addresses = address(block).reshape(num_warps, 4, 8)
        for index, put in enumerate(writers):
            places = block.shared.places(addresses[:, index].ravel(), 16)
            rows = block.shared.read(places, np.repeat(np.arange(num_warps), 8))
            matrix = np.ascontiguousarray(rows).view(np.uint16).reshape(num_warps, 8, 8)
            if is_transposed:
                matrix = matrix.transpose(0, 2, 1)
            put(block, joined(matrix[:, _ROWS, _COLS], matrix[:, _ROWS, _COLS + 1]).ravel(), mask)

    return act


def _store(kernel: Kernel, instruction: Instruction) -> Act:
    """``stmatrix``: as ``ldmatrix``, the other way."""
    readers, is_transposed = [kernel.reader(each, 32) for each in instruction.parts(1)], "trans" in instruction.op
    address, num_warps = kernel.address_reader(instruction.operands[0], 32), kernel.num_threads // 32

    def act(block: Block, mask: Values) -> None:
        assert mask.all()
        addresses = address(block).reshape(num_warps, 4, 8)
        for index, read in enumerate(readers):
            matrix = np.empty((num_warps, 8, 8), np.uint16)
            matrix[:, _ROWS, _COLS], matrix[:, _ROWS, _COLS + 1] = halves_of(read(block).reshape(num_warps, 32))
            if is_transposed:
                matrix = matrix.transpose(0, 2, 1)
            places = block.shared.places(addresses[:, index].ravel(), 16)
            rows = np.ascontiguousarray(matrix).view(np.uint8).reshape(-1, 16)
            block.shared.write(places, rows, np.repeat(np.arange(num_warps), 8))

    return act


def _multiply(kernel: Kernel, instruction: Instruction) -> Act:
    """``mma.sync``: 16x16 by 16x8, bfloat16, with sums in float32."""
    if "m16n8k16" not in instruction.op or instruction.op[-4:] != ("f32", "bf16", "bf16", "f32"):
        raise NotImplementedError(instruction.text)
    writers = [kernel.writer(each) for each in instruction.parts(0)]
    left, right = ([kernel.reader(each, 32) for each in instruction.parts(index)] for index in (1, 2))
    added = [kernel.typed_reader(each, "f32") for each in instruction.parts(3)]
    num_warps = kernel.num_threads // 32

    def act(block: Block, mask: Values) -> None:
        assert mask.all()
        a, b = np.empty((num_warps, 16, 16)), np.empty((num_warps, 16, 8))
        for index, read in enumerate(left):
            rows, cols = _ROWS + 8 * (index % 2), _COLS + 8 * (index // 2)
            a[:, rows, cols], a[:, rows, cols + 1] = _floats(read(block).reshape(num_warps, 32))
        for index, read in enumerate(right):
            rows = _COLS + 8 * index
            b[:, rows, _ROWS], b[:, rows + 1, _ROWS] = _floats(read(block).reshape(num_warps, 32))
        product = a @ b
        sums = [
            read(block) + product[:, _ROWS + 8 * (index // 2), _COLS + index % 2].ravel()
            for index, read in enumerate(added)
        ]
        for put, values in zip(writers, sums, strict=True):
            put(block, values.astype(np.float32), mask)

    return act


def _multiply_groups(kernel: Kernel, instruction: Instruction) -> Act:
    """``wgmma``: 64x16 by 16xN, bfloat16, with sums in float32, for each four warps."""
    shape = next(filter(None, (re.fullmatch(r"m64n(\d+)k16", each) for each in instruction.op)))
    num_cols, is_left_shared = int(shape[1]), instruction.operands[1][0] != "{"
    if instruction.op[-3:] != ("f32", "bf16", "bf16") or kernel.num_threads % 128:
        raise NotImplementedError(instruction.text)
    writers = [kernel.writer(each) for each in instruction.parts(0)]
    sums = [kernel.typed_reader(each, "f32") for each in instruction.parts(0)]
    left = [] if is_left_shared else [kernel.reader(each, 32) for each in instruction.parts(1)]
    left_descriptor = kernel.reader(instruction.operands[1], 64) if is_left_shared else None
    is_left_transposed = is_left_shared and instruction.operands[-2] == "1"
    descriptor, is_added = kernel.reader(instruction.operands[2], 64), kernel.reader(instruction.operands[3], 1)
    is_transposed = instruction.operands[-1] == "1"
    groups = kernel.num_threads // 128
    rows = 16 * np.arange(4)[:, None] + _ROWS  # of a thread, by warp

    def act(block: Block, mask: Values) -> None:
        assert mask.all()
        a = np.empty((groups, 64, 16))
        for index, read in enumerate(left):
            at, cols = rows + 8 * (index % 2), _COLS + 8 * (index // 2)
            a[:, at, cols], a[:, at, cols + 1] = _floats(read(block).reshape(groups, 4, 32))
        if left_descriptor is not None:  # 64 rows are the columns of the transposed matrix
            a = _shared(block, left_descriptor(block), 64, is_transposed=is_left_transposed).transpose(0, 2, 1)
        b = _shared(block, descriptor(block), num_cols, is_transposed=is_transposed)
        product, keeps = a @ b, is_added(block)
        for index, (put, read) in enumerate(zip(writers, sums, strict=True)):
            part = product[:, rows + 8 * (index // 2 % 2), 8 * (index // 4) + _COLS + index % 2].ravel()
            put(block, (np.where(keeps, read(block), np.float32(0)) + part).astype(np.float32), mask)

    return act


def _shared(block: Block, descriptor: Values, num_cols: int, *, is_transposed: bool) -> Values:
    """Return the 16 x ``num_cols`` numbers that each four warps read from shared memory."""
    descriptors = descriptor.reshape(-1, 128)
    assert (descriptors == descriptors[:, :1]).all(), "descriptors differ within four warps"
    found = []
    for each in descriptors[:, 0].tolist():
        places = _columns(each, num_cols, is_transposed=is_transposed)
        bits = np.ascontiguousarray(block.shared.multiply(places)).view(np.uint16)
        found.append(float_of_bfloat(bits).reshape(16, num_cols))
    return np.stack(found)


def _columns(descriptor: int, num_cols: int, *, is_transposed: bool) -> Values:
    """Return the places of the bytes of 16 x ``num_cols`` numbers, ``(16 * num_cols, 2)``."""
    begin, leading, stride = (((descriptor >> shift) & 0x3FFF) << 4 for shift in (0, 16, 32))
    assert not descriptor >> 49 & 7, "a base offset is not simulated"
    span, bits = _SWIZZLED_BYTES[descriptor >> 62], _SWIZZLED_BITS[descriptor >> 62]
    row, col = np.meshgrid(np.arange(16), np.arange(num_cols), indexing="ij")
    if is_transposed:  # columns follow each other: pieces of 8 rows x `span` bytes
        wide = span // 2
        first = begin + col % wide * 2 + col // wide * leading + row % 8 * span + row // 8 * stride
    else:  # rows follow each other: pieces of 8 columns x `span` bytes
        first = begin + row * 2 + col % 8 * span + col // 8 * stride
    first = first ^ (((first >> 7) & bits) << 4)
    places: Values = first.reshape(-1, 1) + np.arange(2)
    return places


def _floats(bits: Values) -> list[Values]:
    return [float_of_bfloat(half) for half in halves_of(bits)]
