"""A model's profile for the ``klt`` quantiser: one file, made once by ``kvfetch calibrate``.

It is a safetensors file with seven tensors a cell. All else is in its metadata: a JSON object under ``kvfetch``. See
docs/format.md.
"""

from __future__ import annotations

import itertools
import math
import operator
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import xxhash
from msgspec import Meta

from sgl_kvfetch.codec.quant.layer_map import LayerMap
from sgl_kvfetch.codec.quant.rope import Rotations
from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why
from sgl_kvfetch.types import CellGrid, TensorName
from sgl_kvfetch.user_files import replace_file

PROFILE_VERSION = 4
_METADATA_KEY = "kvfetch"
_HEADER_LENGTH = struct.Struct("<Q")  # which a safetensors file begins with
# Seven tensors take 0.7 KB of the header, so a profile may have 12,000 cells. The metadata takes a few KB.
_MOST_HEADER_BYTES = 8 << 20
_MOST_METADATA_CHARS = 1 << 20

# Of steps and of KL divergences, beyond what calibration measures, steps up to 45: a KL divergence in nats per token is
# hardly more than the logarithm of the vocabulary's size.
_STEPS, _KLS = (1e-4, 1e3), (1e-9, 100.0)

# How far the transform of a cell, times its inverse, may lead from where it began: rounding the inverse to bfloat16
# makes 0.02 on real models. Audits judge errors by the weights, so these must be those of the inverse.
_MOST_APART = 0.25
_NUM_PROBES = 8

# What a profile may restore, whatever integers somebody has stored: rotated and summed, it is finite in float32. A
# token's scale is at most 16, and a coefficient has 16 bits.
_LARGEST_VALUE, _LARGEST_INTEGER = 2.0**100, 2.0**20

_MOST_BITS = 64.0  # a value, of exact tokens in float32 and of integers

# What a step of 1 in all coefficients should cost, in nats per token, as the weights foretell for fine steps.
UNIT_KL = 1e-4

# What the default of target_kl costs in the mean, as a share of the value of the whole context to the model.
# docs/klt.md explains it.
DEFAULT_SHARE = 1e-3


# What `exact` takes of a bfloat16 value, about: a default that takes more is of no use.
EXACT_BITS = 10.7
# Tokens that a cell is fitted to, for each of its channels: 7 take a fifth more bits than 13, and 5 two fifths.
_TOKENS_A_CHANNEL = 10


class MeasuredStep(msgspec.Struct, frozen=True):
    """The accuracy and size that calibration measured at a step."""

    step: float
    kl: float  # nats per token
    bits_per_value: float  # order-0 entropy of the coefficients


class MeasuredKind(msgspec.Struct, frozen=True):
    """What the steps of a curve cost in one kind of text.

    ``counts``: whether the curve's ``kl`` is that of the worst of this kind and others. ``kls``: in nats per token, of
    each step of the curve. ``context_kl``: the KL divergence when all tokens but the sinks are forgotten.
    """

    name: Annotated[str, Meta(min_length=1, max_length=32)]
    num_windows: Annotated[int, Meta(ge=1, le=1 << 16)]  # of the calibration, with those that are held out
    num_held_out: Annotated[int, Meta(ge=1, le=1 << 16)]
    counts: bool
    context_kl: float
    kls: tuple[float, ...]


class Calibration(msgspec.Struct, frozen=True):
    """A description of the calibration, for people and for a check of the weights."""

    model: str
    weights: str  # fingerprint, as in the namespace
    text: str
    num_windows: int
    context_tokens: Annotated[int, Meta(ge=1)]
    continuation_tokens: int
    notes: tuple[str, ...] = ()
    part: str = ""  # of the text, as FROM:TO


class _Version(msgspec.Struct, frozen=True):
    version: int = 0


_Size = Annotated[int, Meta(ge=1, le=1 << 16)]


class _Metadata(msgspec.Struct, frozen=True):
    version: int
    num_heads: _Size
    k_head_dim: _Size
    v_head_dim: _Size
    cell_layers: _Size
    cell_heads: _Size
    layers: LayerMap
    num_sinks: Annotated[int, Meta(ge=0, le=64)]  # calibration finds up to 8; all are stored as they are
    curve: tuple[MeasuredStep, ...]
    context_kl: float
    kinds: tuple[MeasuredKind, ...]
    calibration: Calibration

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that do not fit together, which msgspec turns into a DecodeError."""
        kls = [*(p.kl for p in self.curve), self.context_kl]
        in_range = all(_STEPS[0] <= p.step <= _STEPS[1] for p in self.curve) and all(
            _KLS[0] <= n <= _KLS[1] for n in kls
        )
        rises = all(a.step < b.step and a.kl < b.kl for a, b in itertools.pairwise(self.curve))
        if len(self.curve) < 2 or not rises or not in_range:
            raise ValueError(
                "its curve needs two or more points that rise in step and in kl, steps from "
                f"{_STEPS[0]:g} to {_STEPS[1]:g}, and kl and context_kl from {_KLS[0]:g} to {_KLS[1]:g}"
            )
        if not all(0 <= p.bits_per_value <= _MOST_BITS for p in self.curve):
            raise ValueError(f"its curve needs bits_per_value from 0 to {_MOST_BITS:g}")
        _require_kinds(self.kinds, self.curve)
        if self.num_heads % self.cell_heads:
            raise ValueError(f"cell_heads is {self.cell_heads}, expected a divisor of num_heads = {self.num_heads}")
        if not self.layers.coded:
            raise ValueError("its map has no layer that is coded")
        for rope in self.layers.rotations:
            if rope.rotary_dim > self.k_head_dim:
                raise ValueError(f"a rotation turns {rope.rotary_dim} channels, but heads have {self.k_head_dim}")


def _require_kinds(kinds: Sequence[MeasuredKind], curve: Sequence[MeasuredStep]) -> None:
    """Raise ValueError unless the curve is that of the worst of the kinds that count."""
    if not kinds:  # a profile that was made without text
        return
    names = [kind.name for kind in kinds]
    if len({*names}) != len(names) or not all(name.isprintable() for name in names):
        raise ValueError(f"its kinds of text are called {names}, expected different names that can be printed")
    for kind in kinds:
        if len(kind.kls) != len(curve):
            raise ValueError(
                f"its kind {kind.name!r} has {len(kind.kls)} of kls, expected one for each of {len(curve)} steps"
            )
        if not all(0 <= n <= _KLS[1] for n in (*kind.kls, kind.context_kl)):
            raise ValueError(f"its kind {kind.name!r} needs numbers from 0 to {_KLS[1]:g} as kls and context_kl")
    for i, point in enumerate(curve):
        worst = max((kind.kls[i] for kind in kinds if kind.counts), default=None)
        if worst != point.kl:
            raise ValueError(
                f"its curve has the kl {point.kl:g} at the step {point.step:g}, but its worst kind {worst}"
            )


@dataclass(frozen=True)
class CellProfile:
    """One cell's transform for a step of 1. C channels are ordered by tensor (K, then V), layer, head and dim."""

    inverse: torch.Tensor  # bfloat16 (C, C): row c is what coefficient c adds to the channels; by descending reach
    # float32 (layers, heads * dim, heads * dim): the blocks of a block-diagonal W with forward = W @ inverse.T, see
    # `calibrate.fit`
    k_weight: torch.Tensor
    v_weight: torch.Tensor
    mean: torch.Tensor  # float32 (C,), of K before its rotation and of V
    spread: torch.Tensor  # float32 (C,), the coefficients' standard deviations
    # float32 (2, C): the magnitude that a coefficient, divided by its token's scale, exceeded in 1% of the
    # calibration's tokens, and its largest magnitude
    reach: torch.Tensor
    # float32: weights of a token's features and a constant, which predict the logarithm of the cost of its errors: see
    # `quant.klt`
    sensitivity: torch.Tensor

    @property
    def num_channels(self) -> int:
        return self.mean.numel()


@dataclass(frozen=True)
class Profile:
    """A model's calibrated transforms."""

    grid: CellGrid  # of the layers that are coded, as `layers` has them
    k_head_dim: int
    v_head_dim: int
    cells: Mapping[tuple[int, int], CellProfile]  # by layer group and head block
    layers: LayerMap
    num_sinks: int  # tokens at the start of a sequence that are kept exact
    curve: tuple[MeasuredStep, ...]  # ascending in `step` and in `kl`, the largest of the kinds that count
    context_kl: float  # the KL divergence when all tokens but the sinks are forgotten
    calibration: Calibration
    kinds: tuple[MeasuredKind, ...] = ()  # of text, with what each step costs; () if no kind was measured

    def head_dim(self, tensor: TensorName) -> int:
        return self.k_head_dim if tensor == "k" else self.v_head_dim

    @property
    def default_target_kl(self) -> float:
        """What the worst kind of text costs at the step at which the mean of those that count costs ``DEFAULT_SHARE``
        of the context's value, limited to the measured range."""
        wanted, means = DEFAULT_SHARE * self.context_kl, self.mean_kls
        for (low, high), (low_mean, high_mean) in zip(
            itertools.pairwise(self.curve), itertools.pairwise(means), strict=True
        ):
            if wanted <= low_mean:
                return low.kl
            if wanted <= high_mean:
                part = 0.0 if not low_mean else math.log(wanted / low_mean) / math.log(high_mean / low_mean)
                return low.kl * math.pow(high.kl / low.kl, part)
        return self.curve[-1].kl

    @property
    def default_bits(self) -> float:
        """What a value takes at the default step, in bits, interpolated between measured steps."""
        step = self.step_for(None)
        for low, high in itertools.pairwise(self.curve):
            if step <= high.step:
                part = math.log(step / low.step) / math.log(high.step / low.step)
                return low.bits_per_value + part * (high.bits_per_value - low.bits_per_value)
        return self.curve[-1].bits_per_value

    @property
    def few_tokens(self) -> str:
        """Why the default takes more bits than it would after more text; "" if there was enough."""
        held_out = sum(kind.num_held_out for kind in self.kinds)
        num_tokens = (self.calibration.num_windows - held_out) * self.calibration.context_tokens
        channels = max(cell.num_channels for cell in self.cells.values())
        if num_tokens >= _TOKENS_A_CHANNEL * channels:
            return ""
        windows = math.ceil(1.25 * _TOKENS_A_CHANNEL * channels / self.calibration.context_tokens)  # a fifth held out
        return (
            f"{num_tokens} tokens are few for cells of {channels} channels, which need {_TOKENS_A_CHANNEL * channels}: "
            f"the default takes {self.default_bits:.2f} bits per value, more than it would after {windows} windows"
        )

    @property
    def mean_kls(self) -> Sequence[float]:
        """The mean over held-out windows of the kinds that count, in nats per token, at each step of the curve."""
        counting = [kind for kind in self.kinds if kind.counts]
        if not counting:
            return [point.kl for point in self.curve]
        weights = [kind.num_held_out for kind in counting]
        columns = zip(*(kind.kls for kind in counting), strict=True)
        return [sum(map(operator.mul, weights, column)) / sum(weights) for column in columns]

    @cached_property
    def rotations(self) -> Rotations | None:
        """The rotations of the coded layers; None if K is coded as it is."""
        return self.layers.coded_rotations()

    @cached_property
    def digest(self) -> str:
        """32 hex digits over all but ``calibration``: equal digests restore each other's coefficients, and promise the
        same of each step."""
        assert self.cells, "an outline has no digest"
        described = PROFILE_VERSION, self.layers, self.num_sinks, self.curve, self.context_kl, self.kinds
        whole = xxhash.xxh3_128(msgspec.json.encode(described))
        for name, x in self._tensors().items():
            whole.update(f"{name} {tuple(x.shape)}".encode())
            whole.update(x.view(torch.uint8).numpy().data)
        return whole.hexdigest()

    def step_for(self, target_kl: float | None) -> float:
        """Return the step for ``target_kl`` nats per token, interpolated between measured steps. None means the
        profile's default. The step is rounded to four digits, so that every machine computes the same one.

        Raises ConfigError for a target outside the measured range.
        """
        target_kl = self.require_target(target_kl)
        for low, high in itertools.pairwise(self.curve):
            if target_kl <= high.kl:
                part = math.log(target_kl / low.kl) / math.log(high.kl / low.kl)
                return float(f"{low.step * (high.step / low.step) ** part:.4g}")
        return self.curve[-1].step

    def require_target(self, target_kl: float | None) -> float:
        """Return what ``target_kl`` stands for. Raises ConfigError if it was not measured."""
        default = self.default_target_kl
        target_kl = default if target_kl is None else target_kl
        if not self.curve[0].kl <= target_kl <= self.curve[-1].kl:
            raise ConfigError(
                f"target_kl = {target_kl:g} is outside this profile's range, {self.curve[0].kl:.2g} to "
                f"{self.curve[-1].kl:.2g}; its default is {default:.2g}"
            )
        return target_kl

    def kl_of(self, step: float) -> float:
        """Return what a step costs, in nats per token, interpolated between measured steps; infinite beyond them."""
        for low, high in itertools.pairwise(self.curve):
            if step <= high.step:
                part = math.log(step / low.step) / math.log(high.step / low.step)
                return low.kl * math.pow(high.kl / low.kl, part)
        return math.inf

    def claimed_step(self, step: float) -> float:
        """Return the step that would cost, as the weights foretell it, what the curve says that ``step`` costs; at most
        ``step``. That of honest curves is hardly less: coarse errors cost about what is foretold, and fine ones more,
        for sums are rounded as well."""
        return min(step, math.sqrt(self.kl_of(step) / UNIT_KL))

    def save(self, path: Path) -> None:
        """Write the file atomically. Raises ConfigError."""
        from safetensors.torch import save

        own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("grid", "cells")}
        of_grid = {name: getattr(self.grid, name) for name in ("num_heads", "cell_layers", "cell_heads")}
        metadata = _Metadata(version=PROFILE_VERSION, **of_grid, **own)
        content = save(self._tensors(), {_METADATA_KEY: msgspec.json.encode(metadata).decode()})
        try:
            replace_file(path, content, 0o666)
        except OSError as e:
            raise ConfigError(f"profile {path} cannot be written: {why(e)}") from e

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{group}.{block}.{field.name}": getattr(cell, field.name).contiguous()
            for (group, block), cell in sorted(self.cells.items())
            for field in fields(CellProfile)
        }


def read_outline(path: Path) -> Profile:
    """Read a profile without its cells, which takes no tensor and hardly any time. Raises ConfigError."""
    with _opened(path) as (m, _):
        return _profile_of(m, {})


def load_profile(path: Path) -> Profile:
    """Read and validate a profile. Raises ConfigError, naming the file and what is wrong with it.

    A store's writers choose what is in it. So no cell is listed before there are as many tensors as all cells have, and
    no tensor is read before its shape is the expected one: a profile takes as much memory as its file has bytes.
    """
    with _opened(path) as (m, file):
        grid = CellGrid(len(m.layers.coded), m.num_heads, m.cell_layers, m.cell_heads)
        found = frozenset(file.keys())
        try:
            _require_tensors(grid, len(found))
            cells = {(g, b): _cell_of(m, file, found, f"{g}.{b}.", len(grid.layers(g))) for g, b in grid.cells()}
        except ValueError as e:
            raise ConfigError(f"profile {path} is malformed: {e}") from e
    return _profile_of(m, cells)


def _profile_of(m: _Metadata, cells: Mapping[tuple[int, int], CellProfile]) -> Profile:
    grid = CellGrid(len(m.layers.coded), m.num_heads, m.cell_layers, m.cell_heads)
    return Profile(
        grid, m.k_head_dim, m.v_head_dim, cells, m.layers, m.num_sinks, m.curve, m.context_kl, m.calibration, m.kinds
    )


def _require_tensors(grid: CellGrid, found: int) -> None:
    """Raise ValueError unless a file has as many tensors as the cells of ``grid``."""
    num_cells, each = grid.num_layer_groups * grid.num_head_blocks, len(fields(CellProfile))
    if found != num_cells * each:
        raise ValueError(
            f"it has {found} tensors, expected {each} for each of {num_cells} cells of {grid.num_layers} layers and "
            f"{grid.num_heads} heads"
        )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[_Metadata, Any]]:
    """Open a profile. Yield its metadata, and its file as safetensors opens it, of which no tensor is read yet. Raises
    ConfigError, also for what fails while it is open."""
    from safetensors import SafetensorError, safe_open

    try:
        _require_header(path)
        with safe_open(path, "pt") as file:
            yield _metadata_of(path, file.metadata() or {}), file
    except (OSError, SafetensorError) as e:
        # safetensors appends the name to its message.
        what = why(e) if isinstance(e, OSError) else str(e).removesuffix(f": {path}")
        raise ConfigError(f"profile {path} cannot be read: {what}") from e


def _require_header(path: Path) -> None:
    """Raise ConfigError if the header is too long: parsing one takes many times its size. Raises OSError."""
    with path.open("rb") as file:
        (num_bytes,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size).ljust(_HEADER_LENGTH.size, b"\0"))
    if num_bytes > _MOST_HEADER_BYTES:
        limit = f"expected a safetensors file with a header of at most {_MOST_HEADER_BYTES}"
        raise ConfigError(f"profile {path} cannot be read: its header would have {num_bytes} bytes, {limit}")


def _metadata_of(path: Path, found: Mapping[str, str]) -> _Metadata:
    metadata = found.get(_METADATA_KEY)
    if metadata is None:
        raise ConfigError(
            f"{path} is not a profile: its metadata has no {_METADATA_KEY!r}; kvfetch calibrate makes one"
        )
    if len(metadata) > _MOST_METADATA_CHARS:
        raise ConfigError(
            f"profile {path} has metadata of {len(metadata)} characters, expected at most {_MOST_METADATA_CHARS}"
        )
    try:
        version = msgspec.json.decode(metadata, type=_Version).version
        if version != PROFILE_VERSION:
            raise ConfigError(f"profile {path} has version {version}, expected {PROFILE_VERSION}; calibrate again")
        return msgspec.json.decode(metadata, type=_Metadata)
    except DECODE_ERRORS as e:
        raise ConfigError(f"profile {path} is malformed: {e}") from e


def _cell_of(m: _Metadata, file: Any, names: Collection[str], prefix: str, num_layers: int) -> CellProfile:
    """Read a cell. ``names``: of all of the file's tensors. Raises ValueError."""
    k, v = m.cell_heads * m.k_head_dim, m.cell_heads * m.v_head_dim
    channels = num_layers * (k + v)
    shapes = {
        "inverse": (channels, channels),
        "k_weight": (num_layers, k, k),
        "v_weight": (num_layers, v, v),
        "mean": (channels,),
        "spread": (channels,),
        "reach": (2, channels),
        "sensitivity": (channels + num_layers * 2 * m.cell_heads + 1,),
    }
    read: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        expected = "BF16" if name == "inverse" else "F32", shape
        found: tuple[str, tuple[int, ...]] | None = None
        if prefix + name in names:
            stored = file.get_slice(prefix + name)
            found = stored.get_dtype(), tuple(stored.get_shape())
        if found != expected:
            raise ValueError(f"{prefix}{name} is {_described(found)}, expected {_described(expected)}")
        x = file.get_tensor(prefix + name)
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{prefix}{name} has values that are not finite")
        read[name] = x
    # Kernels do not look at what they restore, so no value can be out of bounds.
    sums = read["inverse"].abs().sum(0, dtype=torch.float32) * (m.curve[-1].step * _LARGEST_INTEGER)
    largest = float((sums + read["mean"].abs()).max())
    if not largest <= _LARGEST_VALUE:
        raise ValueError(
            f"{prefix}inverse and {prefix}mean could restore values up to {largest:.2g}, expected "
            f"{_LARGEST_VALUE:.2g} at most"
        )
    for name in ("spread", "reach"):
        if float(read[name].min()) < 0:
            raise ValueError(f"{prefix}{name} has values below 0")
    cell = CellProfile(**read)
    if not (apart := _apart(cell)) <= _MOST_APART:
        raise ValueError(
            f"{prefix}k_weight and {prefix}v_weight are not those of {prefix}inverse: what they transform comes back "
            f"{apart:.2g} apart, expected {_MOST_APART:g} at most"
        )
    return cell


def _apart(cell: CellProfile) -> float:
    """Return how far random coefficients, of deviation 1, are off once they were inverted and transformed again, at
    most: 0 if W @ inverse.T inverts ``inverse``. Who makes a profile cannot know which ones: they depend on all of it.
    """
    inverse, blocks = cell.inverse.float(), [*cell.k_weight, *cell.v_weight]
    seed = xxhash.xxh3_64()
    for x in (cell.inverse, cell.k_weight, cell.v_weight):
        seed.update(x.contiguous().view(torch.uint8).numpy().data)
    generator = torch.Generator().manual_seed(seed.intdigest() >> 1)
    probes = torch.randn((cell.num_channels, _NUM_PROBES), generator=generator)
    parts = torch.split(inverse.T @ probes, [len(block) for block in blocks])
    back = inverse @ torch.cat([block @ part for block, part in zip(blocks, parts, strict=True)])
    return float((back - probes).abs().max())


def _described(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    """Return how messages name a tensor's type and shape; None if there is none."""
    return "missing" if tensor is None else f"{tensor[0]} {tensor[1]}"
