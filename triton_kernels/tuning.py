"""How the work is cut into programs: a matter of speed alone, which no result depends on.

What suits a GPU is found by measuring (``scripts/gpu_check --only tune``) or in the compiled code (``python -m
benchmarks.compiled_kernels``). ``tuning.json`` holds what was found, and how; for all else the default goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec
import torch

from sgl_kvfetch.triton_kernels.tiles import next_power_of_2

TABLE = Path(__file__).with_name("tuning.json")

Operation = Literal[
    "restore_exact",
    "restore_symmetric",
    "restore_klt",
    "restore_klt_interleaved",
    "pack_exact",
    "pack_head",
    "pack_layer",
]

# Values and warps of `restore` and `pack`.
_DEFAULT = (2048, 4)
_CANDIDATES = ((1024, 2), (1024, 4), (1024, 8), (2048, 2), (2048, 4), (2048, 8), (4096, 4), (4096, 8))

# Of `restore_klt`.
_TOKENS = (16, 32, 64, 128)
_MOST_TOKENS_BY_DEFAULT = 64
_SUMS_BY_DEFAULT = 2048  # tokens times pairs of channels
_WARPS_BY_DEFAULT = 8
_WARPS = (4, 8)
_MIN_PAIRS = 16  # the least side of a matrix that a tensor core takes
# From so many tokens on, the compiler takes another matrix instruction, which may add in another order.
_TOKENS_OF_NEXT_INSTRUCTION = {"sm": 64, "gfx": 32}


@dataclass(frozen=True, slots=True)
class Tuning:
    """What one program takes of each layer.

    Attributes:
        block: Values; of ``restore_klt``, tokens of one head. A power of two.
        warps: That share it. A power of two.
    """

    block: int
    warps: int

    def __post_init__(self) -> None:
        for name, value, least in (("block", self.block, 16), ("warps", self.warps, 1)):
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}, expected a power of two, {least} or more")


@dataclass(frozen=True, slots=True)
class Key:
    """What a choice is made for.

    Attributes:
        target: ``sm_90`` for compute capability 9.0, or AMD's name: ``gfx942``.
        dtype: The buffers', as torch names it; of the exact operations, the integer of the same size.
    """

    operation: Operation
    target: str
    dtype: str
    head_dim: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A choice that was found to be better than the default, as a line of the table. ``source``: how it was found."""

    operation: Operation
    target: str
    dtype: str
    head_dim: int
    block: int
    warps: int
    source: str

    def __post_init__(self) -> None:
        Tuning(self.block, self.warps)  # raises if it is none

    @property
    def key(self) -> Key:
        return Key(self.operation, self.target, self.dtype, self.head_dim)

    @property
    def tuning(self) -> Tuning:
        return Tuning(self.block, self.warps)


def tuning_for(operation: Operation, buffer: torch.Tensor) -> Tuning:
    """What is launched for buffers like this one, unless the caller knows better."""
    return look_up(key_of(operation, buffer))


def key_of(operation: Operation, buffer: torch.Tensor, target: str | None = None) -> Key:
    """``buffer``: as the kernel gets it; of the exact operations, as integers. ``target``: not the buffer's."""
    dtype = str(buffer.dtype).removeprefix("torch.")
    return Key(operation, target or target_of(buffer.device), dtype, buffer.shape[-1])


def look_up(key: Key, table: Mapping[Key, Entry] | None = None) -> Tuning:
    """``table``: the shipped one if there is none."""
    entry = (_shipped() if table is None else table).get(key)
    return default(key.operation, key.head_dim) if entry is None else entry.tuning


def default(operation: Operation, head_dim: int) -> Tuning:
    if not _is_klt(operation):
        return Tuning(*_DEFAULT)
    tokens = min(_MOST_TOKENS_BY_DEFAULT, _SUMS_BY_DEFAULT // pairs_of(head_dim))
    return Tuning(max(_TOKENS[0], tokens), _WARPS_BY_DEFAULT)


def candidates(operation: Operation, target: str, head_dim: int) -> list[Tuning]:
    """All that may be chosen, the default among them. Which of them are fast, or do not spill, is to be found out.

    For ``restore_klt`` they are those that sum with the same matrix instruction as the default.
    """
    if not _is_klt(operation):
        return [Tuning(*x) for x in _CANDIDATES]
    usual = default(operation, head_dim).block
    border = _TOKENS_OF_NEXT_INSTRUCTION["gfx" if target.startswith("gfx") else "sm"]
    return [
        Tuning(tokens, warps)
        for tokens in _TOKENS
        if usual // 2 <= tokens <= usual * 2 and (tokens < border) == (usual < border)
        for warps in _WARPS
    ]


def pairs_of(head_dim: int) -> int:
    """Pairs of channels in one sum of ``restore_klt``, with those that are padding."""
    return max(_MIN_PAIRS, next_power_of_2(-(-head_dim // 2)))


@lru_cache
def target_of(device: torch.device) -> str:
    """As in `Key`; the device's type if it is no GPU."""
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        architecture: str = torch.cuda.get_device_properties(device).gcnArchName
        return architecture.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def read_table(path: Path = TABLE) -> dict[Key, Entry]:
    """Raises ValueError, naming the file, unless it is a table, with one entry a key."""
    try:
        entries = msgspec.json.decode(path.read_bytes(), type=list[Entry])
        table = {x.key: x for x in entries}
    except ValueError as e:  # msgspec's errors are
        raise ValueError(f"{path}: {e}") from e
    if len(table) < len(entries):
        raise ValueError(f"{path}: two entries for one key")
    return table


def table_text(entries: Iterable[Entry]) -> str:
    """A table as it is stored, one entry a line."""
    lines = [msgspec.json.encode(x).decode() for x in entries]
    return "[\n " + ",\n ".join(lines) + "\n]\n"


@lru_cache
def _shipped() -> dict[Key, Entry]:
    return read_table()


def _is_klt(operation: Operation) -> bool:
    return operation.startswith("restore_klt")
