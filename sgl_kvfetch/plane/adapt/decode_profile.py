"""Decode profiles: a chunk's size and decode time, by variant and by the number of chunks decoded at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import msgspec

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, why

VERSION = 1


class VariantProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One way to encode a chunk.

    ``decode_s[k - 1]``: seconds per chunk when ``k`` chunks are decoded at once. ``switch_s``: additional seconds that
    a session needs if it is new, or if its previous chunk was of another variant.
    """

    name: str  # a resolution, or a codec that has no pictures
    size_bytes: int
    decode_s: tuple[float, ...]
    switch_s: float = 0.0


class DecodeProfile(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One machine's decode times for a chunk in each variant, smallest variant first as in KVFetcher's tables."""

    device: str
    source: str  # a paper's table, or when and how the figures were measured
    variants: tuple[VariantProfile, ...]
    chunk_values: int | None = None  # integers in the measured chunk; decode times are proportional to it
    version: int = VERSION

    def __post_init__(self) -> None:
        """Check the fields. Raises ConfigError."""
        if self.version != VERSION:
            raise ConfigError(f"decode profile has version {self.version}; expected {VERSION}")
        names = [v.name for v in self.variants]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"variants are {', '.join(names) or 'none'}; expected at least one, with unique names")
        if self.chunk_values is not None and self.chunk_values < 1:
            raise ConfigError(f"chunk_values is {self.chunk_values}; expected at least 1")
        for v in self.variants:
            if len(v.decode_s) != len(self.variants[0].decode_s) or not v.decode_s:
                raise ConfigError(
                    f"variant {v.name!r} has {len(v.decode_s)} decode times; expected one per concurrency level, "
                    f"{len(self.variants[0].decode_s)}, as in variant {self.variants[0].name!r}"
                )
            if v.size_bytes < 1 or not all(0 < t < math.inf for t in v.decode_s) or not 0 <= v.switch_s < math.inf:
                raise ConfigError(
                    f"variant {v.name!r} has size {v.size_bytes}, decode times {v.decode_s}, switch {v.switch_s}; "
                    "sizes and times must be positive and finite"
                )

    @property
    def max_concurrency(self) -> int:
        """Return the largest measured concurrency."""
        return len(self.variants[0].decode_s)

    @cached_property
    def num_sessions(self) -> int:
        """Return the pool size with the highest throughput in its fastest variant; of equal sizes, the smallest."""
        return max(
            range(1, self.max_concurrency + 1), key=lambda k: (max(k / v.decode_s[k - 1] for v in self.variants), -k)
        )

    def find_variant(self, codec: str, resolution: str) -> int | None:
        """Return the index of the profile's variant for a stored one, or None. ``kvfetch decoders`` names variants by
        codec and resolution, or by codec if it has no pictures; the paper's tables, all HEVC, by resolution."""
        wanted = [f"{codec} {resolution}", codec]
        if codec.startswith("hevc"):
            wanted.append(resolution)
        names = [v.name for v in self.variants]
        return next((names.index(name) for name in wanted if name in names), None)

    def decode_time_s(self, variant: int, concurrency: int) -> float:
        """Return the seconds per chunk. Beyond the measured concurrency, throughput is assumed to be constant."""
        times = self.variants[variant].decode_s
        if concurrency <= len(times):
            return times[concurrency - 1]
        return times[-1] * concurrency / len(times)

    def corrected(self, factors: Mapping[int, float]) -> Self:
        """Return a profile with these variants' decode times multiplied by ``factors``."""
        variants = tuple(
            msgspec.structs.replace(v, decode_s=tuple(t * factors.get(i, 1.0) for t in v.decode_s))
            for i, v in enumerate(self.variants)
        )
        return msgspec.structs.replace(self, variants=variants)

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


class Decoded(msgspec.Struct, frozen=True):
    """One decoded chunk. ``ratio``: its decode time divided by the profile's, for the concurrency at that time."""

    variant: int
    ratio: float


_LARGEST_CORRECTION = 8.0
_NEWEST_WEIGHT = 0.25


def corrections(decoded: Sequence[Decoded], num_variants: int) -> dict[int, float]:
    """Return factors for a profile's decode times, from observations ordered from oldest to newest.

    Each factor is an exponentially weighted geometric mean. A variant without observations gets the mean of all
    variants: a machine that is slower than its profile is probably slower there too. Ratios are clipped to between 1/8
    and 8, to limit the effect of an outlier.
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


def load_decode_profile(path: Path) -> DecodeProfile:
    """Read a decode profile. Raises ConfigError, which names the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=DecodeProfile)
    except OSError as e:
        raise ConfigError(f"{path}: {why(e)}") from e
    except (*DECODE_ERRORS, ConfigError) as e:
        raise ConfigError(f"{path}: invalid decode profile: {e}") from e
