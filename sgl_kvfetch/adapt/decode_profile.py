"""How large a chunk is and how long it takes to decode, by variant and by how many are decoded at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import msgspec

from sgl_kvfetch.errors import ConfigError

VERSION = 1


class VariantProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One way to code a chunk.

    ``decode_s[k - 1]``: seconds that each of ``k`` chunks takes when as many are decoded at once. ``switch_s``: what a
    session needs on top when the chunk before was of another variant, or when it is new.
    """

    name: str  # a resolution, or a codec where pictures have no say
    size_bytes: int
    decode_s: tuple[float, ...]
    switch_s: float = 0.0


class DecodeProfile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What one machine needs for a chunk in each variant. The smallest variant first, as in KVFetcher's tables."""

    device: str
    source: str  # where the figures come from: a paper's table, or when and how they were measured
    variants: tuple[VariantProfile, ...]
    chunk_values: int | None = None  # integers in the chunk that was measured; times go with it
    version: int = VERSION

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.version != VERSION:
            raise ConfigError(f"decode profile is of version {self.version}; expected {VERSION}")
        names = [v.name for v in self.variants]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"variants are {', '.join(names) or 'none'}; expected at least one, and each name once")
        if self.chunk_values is not None and self.chunk_values < 1:
            raise ConfigError(f"chunk_values is {self.chunk_values}; expected at least 1")
        for v in self.variants:
            if len(v.decode_s) != len(self.variants[0].decode_s) or not v.decode_s:
                raise ConfigError(
                    f"variant {v.name!r} has {len(v.decode_s)} decode times; expected one a concurrency, "
                    f"{len(self.variants[0].decode_s)} as {self.variants[0].name!r} has"
                )
            if v.size_bytes < 1 or not all(0 < t < math.inf for t in v.decode_s) or not 0 <= v.switch_s < math.inf:
                raise ConfigError(
                    f"variant {v.name!r} has size {v.size_bytes}, decode times {v.decode_s}, switch {v.switch_s}; "
                    "sizes and times must be positive and finite"
                )

    @property
    def max_concurrency(self) -> int:
        """The largest concurrency that was measured."""
        return len(self.variants[0].decode_s)

    @cached_property
    def num_sessions(self) -> int:
        """How large a pool decodes most chunks a second, in the variant that is fastest then. The smaller of equals."""
        return max(
            range(1, self.max_concurrency + 1), key=lambda k: (max(k / v.decode_s[k - 1] for v in self.variants), -k)
        )

    @cached_property
    def pool_share_s(self) -> tuple[float, ...]:
        """By variant: the least time of the whole pool that a chunk takes, however many are decoded at once."""
        return tuple(min(t / k for k, t in enumerate(v.decode_s, 1)) for v in self.variants)

    def index(self, name: str) -> int:
        """Raises ConfigError for a variant that is not in the profile."""
        for i, variant in enumerate(self.variants):
            if variant.name == name:
                return i
        raise ConfigError(f"variant {name!r} is not in the profile; it has {', '.join(v.name for v in self.variants)}")

    def find(self, codec: str, resolution: str) -> int | None:
        """The profile's variant for a stored one. ``kvfetch profile`` names them by codec and resolution, or by codec
        where pictures have no say; the paper's tables, all of them HEVC, by resolution. None if there is none."""
        wanted = [f"{codec} {resolution}", codec]
        if codec.startswith("hevc"):
            wanted.append(resolution)
        names = [v.name for v in self.variants]
        return next((names.index(name) for name in wanted if name in names), None)

    def decode_time_s(self, variant: int, concurrency: int) -> float:
        """Beyond what was measured, the decoders are taken for busy: more chunks, each as much slower."""
        times = self.variants[variant].decode_s
        if concurrency <= len(times):
            return times[concurrency - 1]
        return times[-1] * concurrency / len(times)

    def corrected(self, factors: Mapping[int, float]) -> Self:
        """With the decode times of these variants multiplied."""
        variants = tuple(
            msgspec.structs.replace(v, decode_s=tuple(t * factors.get(i, 1.0) for t in v.decode_s))
            for i, v in enumerate(self.variants)
        )
        return msgspec.structs.replace(self, variants=variants)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Decoded(msgspec.Struct, frozen=True):
    """One chunk that was decoded. ``ratio``: how long it took against what the profile said, while as many others were
    decoded as there were."""

    variant: int
    ratio: float


_LARGEST_CORRECTION = 8.0
_NEWEST_WEIGHT = 0.25


def corrections(decoded: Sequence[Decoded], num_variants: int) -> dict[int, float]:
    """Factors for the decode times of a profile, from what was observed, the oldest first.

    For each variant an exponentially weighted geometric mean. What was not tried yet gets that of all together: a
    machine that is slower than its profile is slower at that too. One outlier moves a factor by no more than its
    weight allows, since ratios are cut to 8 either way.
    """
    together: float | None = None
    by_variant: dict[int, float] = {}
    for d in decoded:
        log = math.log(min(_LARGEST_CORRECTION, max(1 / _LARGEST_CORRECTION, d.ratio)))
        by_variant[d.variant] = _moved(by_variant.get(d.variant, together), log)
        together = _moved(together, log)
    if together is None:
        return {}
    return {v: math.exp(by_variant.get(v, together)) for v in range(num_variants)}


def _moved(mean: float | None, newest: float) -> float:
    return newest if mean is None else mean + _NEWEST_WEIGHT * (newest - mean)


def decode_profile(data: bytes) -> DecodeProfile:
    """Raises ConfigError for what is not a profile."""
    try:
        return msgspec.json.decode(data, type=DecodeProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as e:
        raise ConfigError(f"decode profile is not understood: {e}") from e


def load_decode_profile(path: Path) -> DecodeProfile:
    """Raises ConfigError, naming the file."""
    try:
        return decode_profile(path.read_bytes())
    except (OSError, ConfigError) as e:
        raise ConfigError(f"{path}: {e}") from e
