"""Reads a kernel's PTX: its parameters, registers, labels and instructions."""

from __future__ import annotations

import re
from dataclasses import dataclass

from harness.ptx.values import width_of

_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s{}\[\]]+")


@dataclass(frozen=True)
class Guard:
    """``@%p1`` or ``@!%p1``: which threads execute an instruction."""

    predicate: str
    is_negated: bool


@dataclass(frozen=True)
class Instruction:
    """``op``: the parts of its name, such as ``("add", "s32")``. ``operands``: registers, numbers, names, ``[address]``
    or ``{several}``."""

    op: tuple[str, ...]
    guard: Guard | None
    operands: tuple[str, ...]
    text: str

    def parts(self, index: int) -> list[str]:
        """Return the registers of an operand in braces, or the operand itself."""
        return [x.strip() for x in self.operands[index].strip("{}").split(",")]


@dataclass(frozen=True)
class Program:
    """``parameters``: each one's name and bits. ``registers``: bits by the name without its number; predicates have 1.
    ``labels``: the index of the instruction that follows."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    num_threads: int
    registers: dict[str, int]
    code: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(ptx: str) -> Program:
    """Read the only kernel of a module."""
    entry = ptx[ptx.index(".entry") :]
    head, _, body = entry.partition(")\n")
    name, threads = re.search(r"\.entry (\w+)\(", entry), re.search(r"\.reqntid (\d+)", entry)
    assert name is not None
    assert threads is not None
    parameters = re.findall(r"\.param \.(\w+)[^,\n]*?\b(\w+_param_\d+)", head)
    body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.index("$L__func_end")])
    registers: dict[str, int] = {}
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in body.split("\n"):
        while found := re.match(r"\s*(\$\w+):", line):
            labels[found[1]] = len(code)
            line = line[found.end() :]
        for statement in filter(None, (x.strip().lstrip("{").strip() for x in line.split(";"))):
            if statement.startswith(".reg"):
                _, kind, names = statement.split(None, 2)
                registers |= {each: width_of(kind[1:]) for each, _ in re.findall(r"([%\w]+)<(\d+)>", names)}
            elif statement[0] not in ".}":
                code.append(_instruction(statement))
    widths = tuple((each, width_of(kind)) for kind, each in parameters)
    return Program(name[1], widths, int(threads[1]), registers, tuple(code), labels)


def _instruction(statement: str) -> Instruction:
    guard, text = None, statement
    if found := re.match(r"@(!?)(%p\d+)\s+", text):
        guard = Guard(found[2], found[1] == "!")
        text = text[found.end() :]
    op, _, operands = text.replace("\t", " ").partition(" ")
    return Instruction(tuple(op.split(".")), guard, tuple(_OPERANDS.findall(operands)), " ".join(statement.split()))
