"""Runs the blocks of a kernel, all threads of a block in lock-step.

An instruction is decoded once, into a function of a block: its operands are looked up by name then, so what is left for
each execution is numpy's work. The register file maps names to arrays of a value a thread.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from harness.ptx import accesses, arithmetic, matrices
from harness.ptx.global_memory import GlobalMemory
from harness.ptx.program import Guard, Instruction, parse
from harness.ptx.shared_memory import SharedMemory
from harness.ptx.values import SIGNED, UNSIGNED, Fault, Values, width_of

_WARP = 32
_UNDEFINED = 0xDEADBEEFDEADBEEF  # in registers that nothing wrote
_ENDS = -1

Read = Callable[["Block"], Values]
Act = Callable[["Block", Values], None]  # the second argument says which threads execute the instruction


class Block:
    """The state of a block while it runs."""

    def __init__(self, kernel: Kernel, index: int, arguments: Sequence[int], memory: GlobalMemory) -> None:
        self.index = index
        self.arguments = dict(zip((name for name, _ in kernel.program.parameters), arguments, strict=True))
        self.memory = memory
        self.shared = SharedMemory(kernel.shared_bytes)
        self.threads = index * kernel.num_threads + np.arange(kernel.num_threads)
        self.registers: dict[str, Values] = {}


class Kernel:
    """A compiled kernel. ``shared_bytes``: the size of a block's shared memory."""

    def __init__(self, ptx: str, shared_bytes: int) -> None:
        self.program = parse(ptx)
        self.shared_bytes = shared_bytes
        self.num_threads = self.program.num_threads
        self.warps = np.arange(self.num_threads) // _WARP
        self.lanes = np.arange(self.num_threads) % _WARP
        self.everyone = np.ones(self.num_threads, bool)
        self._steps = [self._decode(each) for each in self.program.code]

    def launch(self, num_blocks: int, arguments: Sequence[int], memory: GlobalMemory) -> None:
        """Run blocks one after the other. ``arguments``: a number for each parameter; scratch pointers that Triton adds
        may be left out. Raises Fault."""
        missing = len(self.program.parameters) - len(arguments)
        for index in range(num_blocks):
            self._run(Block(self, index, [*arguments, *[0] * missing], memory))

    def without(self, *names: str) -> Kernel:
        """Return this kernel without the instructions whose names begin like this, to test which faults are found."""
        other = object.__new__(Kernel)
        other.__dict__ |= self.__dict__
        pairs = zip(self.program.code, self._steps, strict=True)
        other._steps = [_nothing if ".".join(each.op).startswith(names) else step for each, step in pairs]
        return other

    def _run(self, block: Block) -> None:
        position = 0
        with np.errstate(all="ignore"):
            while position < len(self._steps):
                try:
                    target = self._steps[position](block)
                except Fault as fault:
                    text = self.program.code[position].text
                    raise Fault(f"{self.program.name}, block {block.index}, at {text[:100]!r}: {fault}") from None
                if target == _ENDS:
                    return
                position = position + 1 if target is None else target

    def _decode(self, instruction: Instruction) -> Callable[[Block], int | None]:
        mask_of = self._mask_reader(instruction.guard)
        kind = instruction.op[0]
        if kind in ("bra", "ret"):
            target = _ENDS if kind == "ret" else self.program.labels[instruction.operands[0]]

            def branch(block: Block) -> int | None:
                mask = mask_of(block)
                if mask.all():
                    return target
                if mask.any():
                    raise Fault("threads of a block branch apart")
                return None

            return branch
        act = self._act(instruction)

        def step(block: Block) -> None:
            act(block, mask_of(block))

        return step

    def _act(self, instruction: Instruction) -> Act:
        for decode in (accesses.decode, matrices.decode):
            if (act := decode(self, instruction)) is not None:
                return act
        compute, put = arithmetic.decode(self, instruction), self.writer(instruction.operands[0].partition("|")[0])
        return lambda block, mask: put(block, compute(block), mask)

    def _mask_reader(self, guard: Guard | None) -> Read:
        if guard is None:
            return lambda block: self.everyone
        read = self.reader(guard.predicate, 1)
        return (lambda block: ~read(block)) if guard.is_negated else read

    def reader(self, token: str, bits: int) -> Read:
        """Return what reads an operand as unsigned numbers of this size, or as bool for one bit."""
        if token == "%ctaid.x":
            return lambda block: np.full(self.num_threads, block.index, UNSIGNED[bits])
        if (constant := self._constant(token, bits)) is not None:
            return lambda block: constant
        undefined = self._filled(_UNDEFINED, self._width(token))
        if self._width(token) == bits:
            return lambda block: block.registers.get(token, undefined)
        return lambda block: block.registers.get(token, undefined).astype(UNSIGNED[bits])

    def typed_reader(self, token: str, kind: str) -> Read:
        """Return what reads an operand as numbers of a type such as ``s32``, ``f32`` or ``pred``."""
        bits = width_of(kind)
        read = self.reader(token, bits)
        if kind[0] not in "sf" or kind == "f16":
            return read
        dtype = SIGNED[bits] if kind[0] == "s" else np.float32
        return lambda block: read(block).view(dtype)

    def writer(self, token: str) -> Callable[[Block, Values, Values], None]:
        """Return what writes numbers of any type to a register, for some threads. Larger ones are cut, and smaller ones
        are extended, by their sign if they have one: there are no registers of 8 bits."""
        if token == "_":
            return lambda block, values, mask: None
        bits = self._width(token)

        def put(block: Block, values: Values, mask: Values) -> None:
            if values.dtype != bool:
                if values.dtype.kind == "f":
                    values = values.view(UNSIGNED[values.dtype.itemsize * 8])
                values = values.astype(UNSIGNED[bits], copy=False)
            if mask is not self.everyone and not mask.all():
                values = np.where(mask, values, block.registers.get(token, np.zeros_like(values)))
            block.registers[token] = values

        return put

    def address_reader(self, token: str, bits: int) -> Read:
        """Return what reads an address such as ``[%rd1+16]``."""
        found = re.fullmatch(r"\[\s*([%\w.]+)\s*(?:\+\s*(-?\d+))?\s*\]", token)
        assert found is not None, token
        read, offset = self.reader(found[1], bits), UNSIGNED[bits](int(found[2] or 0) % (1 << bits))
        return lambda block: read(block) + offset

    def _constant(self, token: str, bits: int) -> Values | None:
        known: dict[str, Any] = {"%tid.x": np.arange(self.num_threads), "%laneid": self.lanes, "global_smem": 0}
        known |= dict.fromkeys(("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z"), 0)
        if token in known:
            return np.broadcast_to(np.asarray(known[token], UNSIGNED[bits]), self.num_threads)
        if re.fullmatch(r"0f[0-9A-F]{8}", token):
            return self._filled(int(token[2:], 16), bits)
        if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", token):
            return self._filled(int(token.rstrip("U"), 0), bits)
        return None

    def _filled(self, number: int, bits: int) -> Values:
        if bits == 1:
            return np.full(self.num_threads, number % 2 != 0)
        return np.full(self.num_threads, number % (1 << bits), UNSIGNED[bits])

    def _width(self, register: str) -> int:
        return self.program.registers[register.rstrip("0123456789")]


def _nothing(block: Block) -> None:
    pass
