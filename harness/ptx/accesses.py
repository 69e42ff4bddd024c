"""Decodes loads, stores, asynchronous copies and barriers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from harness.ptx.program import Instruction
from harness.ptx.values import SIGNED, UNSIGNED, Fault, Values, width_of

if TYPE_CHECKING:
    from harness.ptx.block import Act, Block, Kernel


def decode(kernel: Kernel, instruction: Instruction) -> Act | None:
    op = instruction.op
    match op[0]:
        case "ld" if op[1] == "param":
            return _parameter(kernel, instruction)
        case "ld":
            return _load(kernel, instruction)
        case "st":
            return _store(kernel, instruction)
        case "cp" if op[2] == "commit_group":
            return lambda block, mask: block.shared.commit_copies()
        case "cp" if op[2] == "wait_group":
            num_left = int(instruction.operands[0])
            return lambda block, mask: block.shared.wait_copies(num_left)
        case "cp":
            return _copy(kernel, instruction)
        case "bar" if op[1] == "sync":
            return lambda block, mask: block.shared.barrier()
        case "bar" | "fence" | "membar":  # of a warp, which is in lock-step anyway, or of orders that are not modelled
            return lambda block, mask: None
    return None


def _parameter(kernel: Kernel, instruction: Instruction) -> Act:
    put, bits = kernel.writer(instruction.operands[0]), width_of(instruction.op[-1])
    name = instruction.operands[1].strip("[]")

    def act(block: Block, mask: Values) -> None:
        number = block.arguments[name] % (1 << bits)
        put(block, np.full(kernel.num_threads, number, UNSIGNED[bits]), mask)

    return act


def _load(kernel: Kernel, instruction: Instruction) -> Act:
    bits, is_shared = width_of(instruction.op[-1]), "shared" in instruction.op[1]
    kind = (SIGNED if instruction.op[-1][0] == "s" else UNSIGNED)[bits]
    writers = [kernel.writer(each) for each in instruction.parts(0)]
    address, size = kernel.address_reader(instruction.operands[1], 32 if is_shared else 64), bits // 8 * len(writers)

    def act(block: Block, mask: Values) -> None:
        which = np.flatnonzero(mask)
        if not len(which):
            return
        found = address(block)[which]
        if is_shared:
            data = block.shared.read(block.shared.places(found, size), kernel.warps[which])
        else:
            data = block.memory.load(found, size, block.threads[which])
        for index, put in enumerate(writers):
            values = np.zeros(kernel.num_threads, kind)
            part = data[:, index * bits // 8 : (index + 1) * bits // 8]
            values[which] = np.ascontiguousarray(part).view(kind)[:, 0]
            put(block, values, mask)

    return act


def _store(kernel: Kernel, instruction: Instruction) -> Act:
    bits, is_shared = width_of(instruction.op[-1]), "shared" in instruction.op[1]
    readers = [kernel.reader(each, bits) for each in instruction.parts(1)]
    address, size = kernel.address_reader(instruction.operands[0], 32 if is_shared else 64), bits // 8 * len(readers)

    def act(block: Block, mask: Values) -> None:
        which = np.flatnonzero(mask)
        if not len(which):
            return
        found = address(block)[which]
        data = np.stack([read(block)[which] for read in readers], axis=1).view(np.uint8)
        if is_shared:
            block.shared.write(block.shared.places(found, size), data, kernel.warps[which])
        else:
            block.memory.store(found, data, block.threads[which])

    return act


def _copy(kernel: Kernel, instruction: Instruction) -> Act:
    """``cp.async``: of all bytes, or, if the last operand is 0, of zeros. Data is read at once, and arrives later."""
    to, source = kernel.address_reader(instruction.operands[0], 32), kernel.address_reader(instruction.operands[1], 64)
    size = int(instruction.operands[2], 0)
    taken = kernel.reader((*instruction.operands, str(size))[3], 32)

    def act(block: Block, mask: Values) -> None:
        which = np.flatnonzero(mask)
        if not len(which):
            return
        is_taken = taken(block)[which] > 0
        if (taken(block)[which][is_taken] != size).any():
            raise Fault("cp.async copies a part, which is not simulated")
        data = np.zeros((len(which), size), np.uint8)
        if is_taken.any():
            data[is_taken] = block.memory.load(source(block)[which][is_taken], size, block.threads[which][is_taken])
        block.shared.copy(block.shared.places(to(block)[which], size), data, kernel.warps[which])

    return act
