"""The links, GPUs and fetches on which policies are judged. They are seeded, so every run gets the same ones."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import structs

from benchmarks.adaptive.simulator import Scenario
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile

GBPS = 1e9
# As far as we have the paper's text, it does not give its chunks' length in tokens. This is our longest segment.
CHUNK_TOKENS = 8192
MIN_TOKENS, MAX_TOKENS = 20_000, 200_000
MIN_GBPS, MAX_GBPS = 1.0, 40.0
_LEAST_GBPS = 0.1  # lower bound of random traces: no choice of resolution helps on a link that stands still


@dataclass(frozen=True)
class Group:
    """Scenarios that are summarised together."""

    name: str
    description: str
    scenarios: tuple[Scenario, ...]


def num_chunks(tokens: int) -> int:
    return max(1, math.ceil(tokens / CHUNK_TOKENS))


def one_fetch(name: str, profile: DecodeProfile, gbps: list[float], chunks: int, sessions: int | None) -> Scenario:
    trace = tuple(value * GBPS for value in gbps)
    return Scenario(name, profile, trace, ((0.0, chunks),), sessions or profile.num_sessions)


def paper_scene(profile: DecodeProfile, sessions: int | None) -> Group:
    """Return scenarios with the bandwidths of the paper's example, for a third of the chunks each."""
    scenarios = []
    for chunks in (8, 9, 12, 16, 24):
        gbps = [(6.0, 3.0, 4.0)[min(2, i * 3 // chunks)] for i in range(chunks)]
        scenarios.append(one_fetch(f"paper, {profile.device}, {chunks} chunks", profile, gbps, chunks, sessions))
    return Group("paper", "6, then 3, then 4 Gbps, a third of the chunks each", tuple(scenarios))


def trace_file(path: Path, profiles: list[DecodeProfile], sessions: int | None) -> Group:
    """Return a scenario for each line and GPU, with one chunk per sample. Raises ConfigError."""
    lines = list(read_traces(path))
    scenarios = tuple(
        one_fetch(f"{path.name}:{number}, {profile.device}", profile, gbps, len(gbps), sessions)
        for profile in profiles
        for number, gbps in lines
    )
    return Group("trace", f"{path.name}, one chunk per sample", scenarios)


class _Trace(msgspec.Struct):
    """A line of a trace file: bandwidths in Gbps."""

    bw: Annotated[list[Annotated[float, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]


def read_traces(path: Path) -> Iterator[tuple[int, list[float]]]:
    """Yield line numbers and bandwidths in Gbps. Raises ConfigError, which names file and line."""
    number = 0
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), 1):
            if line.strip():
                yield number, msgspec.json.decode(line, type=_Trace).bw
    except (OSError, msgspec.DecodeError) as e:
        raise ConfigError(f'{path}:{number}: {e}; expected lines {{"bw": [Gbps, ...]}}') from e
    if not number:
        raise ConfigError(f"{path} is empty; expected at least one trace")


@dataclass(frozen=True)
class RandomTrace:
    """A scenario, and the random process that its link was drawn from."""

    scenario: Scenario
    kind: str
    level_gbps: float


def random_traces(profiles: list[DecodeProfile], count: int, seed: int, sessions: int | None) -> Group:
    """Return random scenarios: any GPU, 20K to 200K tokens, a level of 1 to 40 Gbps, four kinds of variation."""
    drawn = draw_traces(profiles, count, seed, sessions)
    return Group("random", f"{count} random traces (seed {seed})", tuple(trace.scenario for trace in drawn))


def draw_traces(profiles: list[DecodeProfile], count: int, seed: int, sessions: int | None) -> list[RandomTrace]:
    rng = random.Random(seed)
    drawn = []
    for i in range(count):
        profile = rng.choice(profiles)
        chunks = num_chunks(rng.randint(MIN_TOKENS, MAX_TOKENS))
        kind = rng.choice(sorted(KINDS))
        level = math.exp(rng.uniform(math.log(MIN_GBPS), math.log(MAX_GBPS)))
        gbps = [max(_LEAST_GBPS, level * factor) for factor in KINDS[kind](rng, chunks)]
        name = f"random {i}, {kind}, {level:.1f} Gbps, {profile.device}, {chunks} chunks"
        drawn.append(RandomTrace(one_fetch(name, profile, gbps, chunks, sessions), kind, level))
    return drawn


def _steady(rng: random.Random, count: int) -> list[float]:
    return [math.exp(rng.gauss(0, 0.05)) for _ in range(count)]


def _independent(rng: random.Random, count: int) -> list[float]:
    return [math.exp(rng.gauss(0, 0.7)) for _ in range(count)]


def _walk(rng: random.Random, count: int) -> list[float]:
    log, factors = rng.gauss(0, 0.4), []
    for _ in range(count):
        log = 0.9 * log + rng.gauss(0, 0.2)
        factors.append(math.exp(log))
    return factors


def _jumps(rng: random.Random, count: int) -> list[float]:
    factors: list[float] = []
    while len(factors) < count:
        factors += [math.exp(rng.uniform(math.log(0.3), math.log(3)))] * rng.randint(2, 8)
    return factors[:count]


# Each function draws one factor per chunk, by which the bandwidth differs from the level.
KINDS: dict[str, Callable[[random.Random, int], list[float]]] = {
    "steady": _steady,
    "independent": _independent,
    "walk": _walk,
    "jumps": _jumps,
}


def several_fetches(profiles: list[DecodeProfile], sessions: int | None) -> Group:
    """Return scenarios of 2 and 4 fetches that share one link and one pool, and arrive 0.3 s apart."""
    scenarios = []
    for profile in profiles:
        for count in (2, 4):
            for gbps in (5.0, 20.0, 40.0):
                fetches = tuple((0.3 * i, num_chunks(60_000)) for i in range(count))
                name = f"{count} fetches, {gbps:.0f} Gbps, {profile.device}"
                trace = (gbps * GBPS,)
                scenarios.append(Scenario(name, profile, trace, fetches, sessions or profile.num_sessions))
    return Group("several", "2 and 4 fetches of 60K tokens, 0.3 s apart, steady links", tuple(scenarios))


def wrong_profile(profiles: list[DecodeProfile], factor: float, sessions: int | None) -> Group:
    """Return scenarios with decoders that take ``factor`` times as long as their profile says."""
    scenarios = []
    for profile in profiles:
        slower = profile.corrected(dict.fromkeys(range(len(profile.variants)), factor))
        for gbps in (5.0, 10.0, 20.0, 40.0):
            fetches = ((0.0, num_chunks(120_000)),)
            name = f"decoders take {factor:g}x, {gbps:.0f} Gbps, {profile.device}"
            pool = sessions or profile.num_sessions
            scenarios.append(Scenario(name, slower, (gbps * GBPS,), fetches, pool, believed=profile))
    return Group(
        f"{factor:g}x", f"decoding takes {factor:g} times what the profile says, 120K tokens", tuple(scenarios)
    )


def no_profile(profiles: list[DecodeProfile], sessions: int | None) -> Group:
    """Return scenarios whose policy knows only what it observes: it starts with one time for all variants and loads."""
    scenarios = []
    for profile in profiles:
        mean_s = statistics.fmean(seconds for v in profile.variants for seconds in v.decode_s)
        times_s = (mean_s,) * profile.max_concurrency
        alike = tuple(structs.replace(v, decode_s=times_s, switch_s=0.0) for v in profile.variants)
        for scenario in grid(profile, sessions).scenarios:
            scenarios.append(replace(scenario, believed=structs.replace(profile, variants=alike)))
    return Group("unprofiled", "the steady links again, three GPUs, without a profile", tuple(scenarios))


HEAT_GBPS = (1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 25.0, 30.0, 40.0)
HEAT_TOKENS = (20_000, 50_000, 80_000, 120_000, 160_000, 200_000)


def grid(profile: DecodeProfile, sessions: int | None) -> Group:
    """Return scenarios with steady links, for all combinations of bandwidth and length."""
    scenarios = tuple(
        one_fetch(
            f"grid, {gbps:g} Gbps, {tokens} tokens, {profile.device}", profile, [gbps], num_chunks(tokens), sessions
        )
        for tokens in HEAT_TOKENS
        for gbps in HEAT_GBPS
    )
    return Group(
        f"grid {profile.device}", f"{profile.device}, steady links of 1 to 40 Gbps, 20K to 200K tokens", scenarios
    )
