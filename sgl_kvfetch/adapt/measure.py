"""Measure a decode profile: what this machine needs, by variant and by how many chunks are decoded at once."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sgl_kvfetch.adapt.profile import DecodeProfile, VariantProfile


@dataclass(frozen=True, slots=True)
class Sample:
    """One chunk in one variant. ``decode`` decodes it, and may be called from several threads at once."""

    name: str
    size_bytes: int
    decode: Callable[[], object]


def measure_profile(
    samples: Sequence[Sample],
    *,
    device: str,
    source: str,
    chunk_values: int,
    max_concurrency: int,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    on_step: Callable[[str], None] = lambda _: None,
) -> DecodeProfile:
    """Medians over ``rounds`` chunks a session. The variants come out in order of size, the smallest first."""
    ordered = sorted(samples, key=lambda s: s.size_bytes)
    for sample in ordered:
        sample.decode()  # what is done once, a library's loading say, is not a chunk's time
    variants = []
    for sample in ordered:
        on_step(sample.name)
        times = tuple(_median_s(sample, k, rounds, clock) for k in range(1, max_concurrency + 1))
        others = [other for other in ordered if other is not sample]
        switch_s = _switch_s(sample, others, rounds, clock) if others else 0.0
        variants.append(
            VariantProfile(name=sample.name, size_bytes=sample.size_bytes, decode_s=times, switch_s=switch_s)
        )
    return DecodeProfile(device=device, source=source, variants=tuple(variants), chunk_values=chunk_values)


def _median_s(sample: Sample, concurrency: int, rounds: int, clock: Callable[[], float]) -> float:
    """Of a chunk's time while ``concurrency`` are decoded at once."""

    def timed(_: int) -> float:
        started_s = clock()
        sample.decode()
        return clock() - started_s

    with ThreadPoolExecutor(concurrency) as pool:
        # The last ones have less and less company, and are not counted.
        times = list(pool.map(timed, range(concurrency * (rounds + 1))))
    return statistics.median(times[: concurrency * rounds])


def _switch_s(sample: Sample, others: Sequence[Sample], rounds: int, clock: Callable[[], float]) -> float:
    """How much longer a chunk takes after one of another variant than after one of its own."""

    def after(previous: Iterator[Sample]) -> list[float]:
        times = []
        for before in previous:
            before.decode()
            started_s = clock()
            sample.decode()
            times.append(clock() - started_s)
        return times

    other = statistics.median(after(others[i % len(others)] for i in range(rounds)))
    same = statistics.median(after(sample for _ in range(rounds)))
    return max(0.0, other - same)
