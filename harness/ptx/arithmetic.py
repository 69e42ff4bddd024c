"""Decodes instructions that compute a register from others, of each thread or of the threads of a warp."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from harness.ptx.program import Instruction
from harness.ptx.values import SIGNED, UNSIGNED, Values, bfloat_of_float, float_of_bfloat, halves_of, joined, width_of

if TYPE_CHECKING:
    from harness.ptx.block import Block, Kernel

Compute = Callable[["Block"], Values]

_BINARY: dict[str, Callable[[Values, Values], Values]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "rem": np.fmod,  # its sign is the dividend's
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": np.minimum,
    "max": np.maximum,
}
_FLOAT_BINARY = _BINARY | {"min": np.fmin, "max": np.fmax}
_UNARY: dict[str, Callable[[Values], Values]] = {"neg": np.negative, "abs": np.abs, "not": np.invert}
_COMPARISONS: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


def decode(kernel: Kernel, instruction: Instruction) -> Compute:
    """Return a function that computes the first operand. Raises NotImplementedError for instructions that Triton does
    not use in our kernels."""
    op, kind = instruction.op, instruction.op[-1]
    operands = instruction.operands[1:]
    match op[0]:
        case "mov":
            return _move(kernel, instruction)
        case "cvt":
            return _convert(kernel, op, operands)
        case "setp":
            return _compare(op, *(kernel.typed_reader(each, kind) for each in operands))
        case "selp":
            x, y = (kernel.reader(each, width_of(kind)) for each in operands[:2])
            is_first = kernel.reader(operands[2], 1)
            return lambda block: np.where(is_first(block), x(block), y(block))
        case "shl" | "shr" | "shf":
            return _shift(kernel, op, operands)
        case "mul" | "mad" if kind != "f32":
            return _multiply(kernel, op, operands)
        case "div" if kind != "f32":
            return _divide(*(kernel.typed_reader(each, kind) for each in operands))
        case "bfe":
            return _extract(kernel, kind, operands)
        case "prmt":
            return _permute(*(kernel.reader(each, 32) for each in operands))
        case "popc":
            bits = kernel.reader(operands[0], 32)
            return lambda block: np.bitwise_count(bits(block)).astype(np.uint32)
        case "fma":
            a, b, c = (kernel.typed_reader(each, kind) for each in operands)
            return lambda block: (a(block).astype(np.float64) * b(block) + c(block)).astype(np.float32)
        case "redux":
            return _reduce(op[2], kernel.typed_reader(operands[0], kind))
        case "shfl":
            return _shuffle(kernel, op[2], *(kernel.reader(each, 32) for each in operands[:2]))
    if kind == "bf16x2":
        return _pairs(op[0], *(kernel.reader(each, 32) for each in operands))
    inputs = [kernel.typed_reader(each, kind) for each in operands]
    functions: tuple[dict[str, Callable[..., Values]], ...] = (_UNARY, _FLOAT_BINARY if kind == "f32" else _BINARY)
    function = functions[len(inputs) - 1].get(op[0]) if len(inputs) <= 2 else None
    if function is None:
        raise NotImplementedError(instruction.text)
    return lambda block: function(*(read(block) for read in inputs))


def _move(kernel: Kernel, instruction: Instruction) -> Compute:
    """``mov``, also of several registers into a larger one. (The other way round, see `matrices`.)"""
    bits, parts = width_of(instruction.op[-1]), instruction.parts(1)
    if instruction.operands[1][0] != "{":
        return kernel.reader(instruction.operands[1], bits)
    readers = [kernel.reader(each, bits // len(parts)) for each in parts]

    def join(block: Block) -> Values:
        found: Values = np.stack([read(block) for read in readers], axis=1).view(UNSIGNED[bits])[:, 0]
        return found

    return join


def _convert(kernel: Kernel, op: tuple[str, ...], operands: tuple[str, ...]) -> Compute:
    to, of = op[-2:]
    if to in ("bf16", "f16", "bf16x2", "f16x2"):
        assert of == "f32", op
        half = bfloat_of_float if to.startswith("bf16") else lambda x: x.astype(np.float16).view(np.uint16)
        *uppers, low = (kernel.typed_reader(each, "f32") for each in operands)  # the first is the upper half
        if not uppers:
            return lambda block: half(low(block))
        return lambda block: joined(half(low(block)), half(uppers[0](block)))
    if of == "bf16":
        bits = kernel.reader(operands[0], 16)
        assert to == "f32", op
        return lambda block: float_of_bfloat(bits(block))
    source = kernel.typed_reader(operands[0], of)
    if to == "f32":
        return lambda block: source(block).astype(np.float32)
    target = (SIGNED if to[0] == "s" else UNSIGNED)[width_of(to)]
    if of != "f32":
        return lambda block: source(block).astype(target)
    limits, whole = np.iinfo(target), np.trunc if "rzi" in op else np.rint

    def to_integer(block: Block) -> Values:
        numbers = np.nan_to_num(whole(source(block)).astype(np.float64))
        return np.clip(numbers, limits.min, limits.max).astype(target)

    return to_integer


def _compare(op: tuple[str, ...], x: Compute, y: Compute) -> Compute:
    name = op[1]

    def is_unordered(block: Block) -> Values:
        return np.isnan(x(block)) | np.isnan(y(block))

    if name == "num":
        return lambda block: ~is_unordered(block)
    compare = _COMPARISONS[name[:2]]
    if op[-1] != "f32":
        return lambda block: compare(x(block), y(block))
    if len(name) == 3:  # such as "gtu"
        return lambda block: compare(x(block), y(block)) | is_unordered(block)
    return lambda block: compare(x(block), y(block)) & ~is_unordered(block)


def _shift(kernel: Kernel, op: tuple[str, ...], operands: tuple[str, ...]) -> Compute:
    bits = width_of(op[-1])
    if op[0] == "shf":  # to the left, of two registers as one
        assert op[1:] == ("l", "wrap", "b32"), op
        low, high, by = (kernel.reader(each, 32) for each in operands)

        def funnel(block: Block) -> Values:
            both = low(block).astype(np.uint64) | (high(block).astype(np.uint64) << np.uint64(32))
            return ((both << (by(block) & 31).astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)

        return funnel
    value, count = kernel.typed_reader(operands[0], op[-1]), kernel.reader(operands[1], 32)

    def shift(block: Block) -> Values:
        x, by = value(block), count(block)
        within = np.minimum(by, bits - 1).astype(x.dtype)
        shifted: Values = x << within if op[0] == "shl" else x >> within
        keeps_sign = op[0] == "shr" and x.dtype.kind == "i"
        return shifted if keeps_sign else np.where(by < bits, shifted, np.zeros_like(x))

    return shift


def _multiply(kernel: Kernel, op: tuple[str, ...], operands: tuple[str, ...]) -> Compute:
    part, kind = op[1], op[-1]
    bits, types = width_of(kind), SIGNED if kind[0] == "s" else UNSIGNED
    x, y = (kernel.typed_reader(each, kind) for each in operands[:2])
    if part == "lo":
        product: Compute = lambda block: x(block) * y(block)  # noqa: E731
    elif part == "wide":
        bits *= 2
        product = lambda block: x(block).astype(types[bits]) * y(block).astype(types[bits])  # noqa: E731
    else:
        assert part == "hi", op
        assert bits < 64, op
        wide = types[2 * bits]
        product = lambda block: ((x(block).astype(wide) * y(block).astype(wide)) >> wide(bits)).astype(types[bits])  # noqa: E731
    if op[0] == "mul":
        return product
    added = kernel.typed_reader(operands[2], f"{kind[0]}{bits}")
    return lambda block: product(block) + added(block)


def _divide(x: Compute, y: Compute) -> Compute:
    """Divide integers of at most 32 bits, and round to zero."""

    def divide(block: Block) -> Values:
        dividend, divisor = x(block), y(block)
        quotient = np.trunc(dividend.astype(np.float64) / np.where(divisor == 0, 1, divisor))
        return quotient.astype(dividend.dtype)

    return divide


def _extract(kernel: Kernel, kind: str, operands: tuple[str, ...]) -> Compute:
    """``bfe``: some bits of 32, whose highest is a sign in a signed type."""
    assert kind in ("u32", "s32"), kind
    value, first, count = (kernel.reader(each, 32) for each in operands)

    def extract(block: Block) -> Values:
        num_bits = count(block).astype(np.uint64)
        mask = (np.uint64(1) << num_bits) - np.uint64(1)
        found = (value(block).astype(np.uint64) >> first(block).astype(np.uint64)) & mask
        if kind == "s32":
            is_negative = (num_bits > 0) & (found >> (np.maximum(num_bits, 1) - np.uint64(1)) != 0)
            found = np.where(is_negative, found | ~mask, found)
        return found.astype(np.uint32)

    return extract


def _permute(low: Compute, high: Compute, selector: Compute) -> Compute:
    """``prmt``: each byte of the result is one of eight, or its sign."""

    def permute(block: Block) -> Values:
        all_bytes = np.stack((low(block), high(block)), axis=1).view(np.uint8)
        chosen, found = selector(block), np.empty((len(all_bytes), 4), np.uint8)
        for index in range(4):
            which = (chosen >> np.uint32(4 * index)) & np.uint32(15)
            byte = all_bytes[np.arange(len(which)), which & 7]
            found[:, index] = np.where(which & 8, np.where(byte & 128, 255, 0), byte)
        return found.view(np.uint32)[:, 0]

    return permute


def _reduce(name: str, value: Compute) -> Compute:
    """``redux``: the same for all threads of a warp."""
    reduce = _BINARY[name].reduce  # type: ignore[attr-defined]

    def reduced(block: Block) -> Values:
        x = value(block)
        return np.repeat(reduce(x.reshape(-1, 32), axis=1, dtype=x.dtype), 32)

    return reduced


def _shuffle(kernel: Kernel, mode: str, value: Compute, lane: Compute) -> Compute:
    """``shfl``: another lane's value. Lanes with nothing ``up`` keep their own."""
    assert mode in ("bfly", "idx", "up"), mode

    def shuffled(block: Block) -> Values:
        other = lane(block).astype(np.int64) & 31
        if mode == "up":
            source = np.where(kernel.lanes < other, kernel.lanes, kernel.lanes - other)
        else:
            source = kernel.lanes ^ other if mode == "bfly" else other
        return value(block)[32 * kernel.warps + source]

    return shuffled


def _pairs(name: str, x: Compute, y: Compute) -> Compute:
    """Compute with both halves of registers, each by itself."""

    def of_half(a: Values, b: Values) -> Values:
        return bfloat_of_float(_BINARY[name](float_of_bfloat(a), float_of_bfloat(b)))

    return lambda block: joined(*map(of_half, halves_of(x(block)), halves_of(y(block))))
