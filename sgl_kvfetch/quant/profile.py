"""A model's profile: what the ``klt`` quantiser knows of it. One file, made once by ``kvfetch calibrate``.

A safetensors file: the tensors ``inverse``, ``spread`` and ``mean`` of ``k`` and ``v``, and in its metadata, under
``kvfetch``, a JSON object with the rest. See docs/format.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.tiling import Tiling
from sgl_kvfetch.quant.rope import Rope
from sgl_kvfetch.types import TENSORS, TensorName

PROFILE_VERSION = 1
_METADATA_KEY = "kvfetch"


class CurvePoint(msgspec.Struct, frozen=True):
    """What a step was measured to cost in calibration."""

    step: float
    kl: float  # nats a token
    bits_per_value: float  # order-0 entropy of the coefficients


class Calibration(msgspec.Struct, frozen=True):
    """What a profile was made from, for people to read and for a check of the weights."""

    model: str
    weights: str  # fingerprint, as in the namespace
    text: str
    num_windows: int
    context_tokens: int
    continuation_tokens: int
    notes: tuple[str, ...] = ()
    part: str = ""  # of the text, as FROM:TO


class _Metadata(msgspec.Struct, frozen=True):
    version: int
    rope: Rope | None
    curve: tuple[CurvePoint, ...]
    calibration: Calibration
    k_tiling: Tiling | None = None
    v_tiling: Tiling | None = None


@dataclass(frozen=True)
class Profile:
    """``inverse``: bfloat16 ``(layers, blocks, C, C)``; row c is what coefficient c, at step 1, adds to the channels of
    a block. ``spread``: float32 ``(layers, blocks, C)``, the coefficients' standard deviations, in steps of 1.
    ``mean``: float32 ``(layers, heads, dim)``. A block is ``C / dim`` neighbouring heads.

    ``rope`` is None where K is coded with its rotation. ``curve`` rises in ``step`` and in ``kl``.
    """

    inverse: Mapping[TensorName, torch.Tensor]
    spread: Mapping[TensorName, torch.Tensor]
    mean: Mapping[TensorName, torch.Tensor]
    rope: Rope | None
    curve: tuple[CurvePoint, ...]
    calibration: Calibration
    tiling: Mapping[TensorName, Tiling | None]

    @property
    def num_layers(self) -> int:
        return self.mean["k"].shape[0]

    @property
    def num_heads(self) -> int:
        return self.mean["k"].shape[1]

    def head_dim(self, tensor: TensorName) -> int:
        return self.mean[tensor].shape[2]

    def block_heads(self, tensor: TensorName) -> int:
        return self.inverse[tensor].shape[2] // self.head_dim(tensor)

    def tensors(self, tensor: TensorName) -> dict[str, torch.Tensor]:
        return {"inverse": self.inverse[tensor], "spread": self.spread[tensor], "mean": self.mean[tensor]}

    @cached_property
    def digest(self) -> str:
        """Of all that restoration depends on: profiles of one digest restore each other's coefficients."""
        whole = xxhash.xxh3_128(msgspec.json.encode((PROFILE_VERSION, self.rope)))
        for tensor in TENSORS:
            for x in self.tensors(tensor).values():
                whole.update(f"{tuple(x.shape)}".encode())
                whole.update(x.contiguous().view(torch.uint8).numpy().tobytes())
        return whole.hexdigest()

    def step_for(self, target_kl: float) -> float:
        """The step that cost ``target_kl`` nats a token in calibration, interpolated between steps that were measured;
        four digits of it, so that it is the same wherever it is computed.

        Raises ConfigError for a target outside what was measured.
        """
        points = self.curve
        if not points[0].kl <= target_kl <= points[-1].kl:
            raise ConfigError(
                f"target_kl = {target_kl:g}: the profile was measured from {points[0].kl:.2g} to {points[-1].kl:.2g}; "
                "set target_kl to something between"
            )
        for low, high in itertools.pairwise(points):
            if target_kl <= high.kl:
                part = math.log(target_kl / low.kl) / math.log(high.kl / low.kl)
                return float(f"{low.step * (high.step / low.step) ** part:.4g}")
        return points[-1].step

    def with_tiling(self, tensor: TensorName, tiling: Tiling) -> Profile:
        return replace(self, tiling={**self.tiling, tensor: tiling})

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all. Raises ConfigError."""
        from safetensors.torch import save

        metadata = _Metadata(
            PROFILE_VERSION, self.rope, self.curve, self.calibration, self.tiling["k"], self.tiling["v"]
        )
        tensors = {f"{t}.{name}": x.contiguous() for t in TENSORS for name, x in self.tensors(t).items()}
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(save(tensors, {_METADATA_KEY: msgspec.json.encode(metadata).decode()}))
            partial.replace(path)
        except OSError as e:
            partial.unlink(missing_ok=True)
            raise ConfigError(f"profile {path} cannot be written: {e}") from e


def load_profile(path: Path) -> Profile:
    """Raises ConfigError, naming the file and what is wrong with it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = (file.metadata() or {}).get(_METADATA_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as e:
        raise ConfigError(f"profile {path} cannot be read: {e}") from e
    if metadata is None:
        raise ConfigError(
            f"{path} is not a profile: its metadata has no {_METADATA_KEY!r}; kvfetch calibrate makes one"
        )
    try:
        version = msgspec.json.decode(metadata, type=dict[str, Any]).get("version")
        if version != PROFILE_VERSION:
            raise ConfigError(f"profile {path} has version {version}, this reader knows {PROFILE_VERSION}")
        return _validated(msgspec.json.decode(metadata, type=_Metadata), tensors)
    except (msgspec.DecodeError, _ProfileError) as e:
        raise ConfigError(f"profile {path} is malformed: {e}") from e


class _ProfileError(Exception):
    pass


_KINDS = {"inverse": (torch.bfloat16, 4), "spread": (torch.float32, 3), "mean": (torch.float32, 3)}


def _validated(metadata: _Metadata, tensors: Mapping[str, torch.Tensor]) -> Profile:
    found: dict[str, dict[TensorName, torch.Tensor]] = {name: {} for name in _KINDS}
    for tensor in TENSORS:
        for name, (dtype, ndim) in _KINDS.items():
            found[name][tensor] = _tensor(tensors, f"{tensor}.{name}", dtype, ndim)
        layers, heads, dim = found["mean"][tensor].shape
        size = found["inverse"][tensor].shape[-1]
        blocks = heads * dim // size
        if size % dim or blocks * size != heads * dim:
            raise _ProfileError(
                f"{tensor}.inverse has blocks of {size} channels, no whole number of {heads} heads of {dim}"
            )
        for name, shape in (("inverse", (layers, blocks, size, size)), ("spread", (layers, blocks, size))):
            if found[name][tensor].shape != shape:
                raise _ProfileError(f"{tensor}.{name} has shape {tuple(found[name][tensor].shape)}, expected {shape}")
    mean = found["mean"]
    if mean["k"].shape[:2] != mean["v"].shape[:2]:
        raise _ProfileError(f"K has {tuple(mean['k'].shape[:2])} layers and heads, V {tuple(mean['v'].shape[:2])}")
    if metadata.rope is not None and metadata.rope.rotary_dim > mean["k"].shape[2]:
        raise _ProfileError(f"rope turns {metadata.rope.rotary_dim} channels, heads have {mean['k'].shape[2]}")
    curve = metadata.curve
    rises = all(a.step < b.step and a.kl < b.kl for a, b in itertools.pairwise(curve))
    ends = [number for p in (curve[0], curve[-1]) for number in (p.step, p.kl)] if curve else []
    if len(curve) < 2 or not rises or not all(math.isfinite(number) and number > 0 for number in ends):
        raise _ProfileError("its curve needs two or more points that rise in step and in kl, all above 0 and finite")
    tiling: dict[TensorName, Tiling | None] = {"k": metadata.k_tiling, "v": metadata.v_tiling}
    for tensor in TENSORS:
        _require_invertible(tensor, found["inverse"][tensor])
        _require_holds(tensor, tiling[tensor], mean[tensor].shape[2])
    return Profile(
        found["inverse"],
        found["spread"],
        mean,
        metadata.rope,
        curve,
        metadata.calibration,
        tiling,
    )


def _require_invertible(tensor: TensorName, inverse: torch.Tensor) -> None:
    """Writers need the inverse: better to know now than while they serve."""
    for layer, matrices in enumerate(inverse):
        forward, failed = torch.linalg.inv_ex(matrices.double())
        if bool(failed.any()) or not bool(torch.isfinite(forward.float()).all()):
            raise _ProfileError(f"{tensor}.inverse is singular in layer {layer}")


def _require_holds(tensor: TensorName, tiling: Tiling | None, head_dim: int) -> None:
    if tiling is not None and tiling.dim_rows * tiling.dim_cols < head_dim:
        raise _ProfileError(f"{tensor}_tiling is {tiling}, too small for heads of {head_dim} values")


def _tensor(tensors: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype, ndim: int) -> torch.Tensor:
    x = tensors.get(name)
    if x is None or x.dtype != dtype or x.ndim != ndim or not x.numel():
        what = "nothing" if x is None else f"{x.dtype} {tuple(x.shape)}"
        raise _ProfileError(f"{name} is {what}, expected {dtype} of {ndim} dimensions")
    if not bool(torch.isfinite(x).all()):
        raise _ProfileError(f"{name} has values that are not finite")
    return x
