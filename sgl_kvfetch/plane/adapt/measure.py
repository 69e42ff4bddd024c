"""Measures this machine's decode profile, by variant and by the number of chunks decoded at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from sgl_kvfetch.plane.adapt.decode_profile import DecodeProfile, VariantProfile
from sgl_kvfetch.plane.adapt.pool import DecodePool

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Sample(Generic[S]):
    """One chunk in one variant. ``decode`` decodes it on a session; several sessions may call it at once."""

    name: str
    size_bytes: int
    decode: Callable[[S], object]


def measure_profile(
    samples: Sequence[Sample[S]],
    sessions: Sequence[S],
    *,
    device: str,
    source: str,
    chunk_values: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[str], None] = lambda _: None,
) -> DecodeProfile:
    """Return medians over ``rounds`` chunks per session, for 1, 2, ... sessions at once, smallest variant first."""
    ordered = sorted(samples, key=lambda s: s.size_bytes)
    for sample in ordered:
        sample.decode(sessions[0])  # warm up: one-time costs, such as loading a library, must not count
    variants = []
    for sample in ordered:
        on_step(sample.name)
        times = tuple(_median_s(sample, sessions[:k], rounds, clock) for k in range(1, len(sessions) + 1))
        others = [other for other in ordered if other is not sample]
        switch_s = _switch_s(sample, others, sessions[0], rounds, clock) if others else 0.0
        variants.append(
            VariantProfile(name=sample.name, size_bytes=sample.size_bytes, decode_s=times, switch_s=switch_s)
        )
    return DecodeProfile(device=device, source=source, variants=tuple(variants), chunk_values=chunk_values)


def _median_s(sample: Sample[S], sessions: Sequence[S], rounds: int, clock: Callable[[], float]) -> float:
    """Return the median seconds per chunk while all ``sessions`` decode at once."""

    def timed(session: S) -> float:
        started_s = clock()
        sample.decode(session)
        return clock() - started_s

    count = len(sessions)
    with closing(DecodePool(sessions)) as pool:
        times = [future.result() for future in [pool.submit(timed) for _ in range(count * (rounds + 2))]]
    # The first chunks set up their sessions, and the last ones run with fewer others: leave both out.
    return statistics.median(times[count : count * (rounds + 1)])


def _switch_s(
    sample: Sample[S], others: Sequence[Sample[S]], session: S, rounds: int, clock: Callable[[], float]
) -> float:
    """Return the additional seconds that a chunk takes after one of another variant on the same session."""

    def after(previous: Iterator[Sample[S]]) -> list[float]:
        times = []
        for before in previous:
            before.decode(session)
            started_s = clock()
            sample.decode(session)
            times.append(clock() - started_s)
        return times

    other = statistics.median(after(others[i % len(others)] for i in range(rounds)))
    same = statistics.median(after(sample for _ in range(rounds)))
    return max(0.0, other - same)
