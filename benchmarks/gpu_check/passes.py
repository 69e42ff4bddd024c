"""Measures a load beside forward passes: what they cost it, and what it costs them."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise

from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import Ticker
from sgl_kvfetch.codec.cuda_streams import Device, Event, Stream

PASS_SECONDS = (0.01, 0.05, 0.2)
_MIN_PASSES, _MIN_S = 8, 0.5  # of passes alone


def measure(
    record: Record,
    device: Device,
    forward: Stream,
    load: Callable[[], float],
    check: Callable[[], None],
    make_pass: Callable[[float], Callable[[], object]],
) -> None:
    """Record a load alone, and one beside passes of each length. ``load`` returns the seconds that it
    took; ``check`` is called after each. ``make_pass`` returns a function that launches a pass of so many seconds on
    the current stream."""
    with Ticker() as ticker:
        alone_s = load()
    check()
    _record(record, "none", alone_s, alone_s, ticker)
    for seconds in PASS_SECONDS:
        launch_pass = make_pass(seconds)
        with running_passes(device, forward, launch_pass) as ends:
            time.sleep(max(_MIN_S, _MIN_PASSES * seconds))
        pass_alone_s = _durations(ends)
        usual_s = statistics.median(pass_alone_s)
        with running_passes(device, forward, launch_pass) as ends:
            last_before = len(ends) - 1
            with Ticker() as ticker:
                load_s = load()
            first_after = len(ends)
        check()
        pass_beside_s = _durations(ends[last_before : first_after + 1])
        _record(
            record,
            f"{1e3 * seconds:g} ms",
            load_s,
            alone_s,
            ticker,
            passes_meanwhile=len(pass_beside_s),
            passes_lose_ms=1e3 * (sum(pass_beside_s) - len(pass_beside_s) * usual_s),
            pass_alone_ms=1e3 * usual_s,
            pass_beside_ms=1e3 * statistics.median(pass_beside_s),
            longest_alone_ms=1e3 * max(pass_alone_s),
            longest_beside_ms=1e3 * max(pass_beside_s),
        )


def _record(record: Record, passes: str, load_s: float, alone_s: float, ticker: Ticker, **columns: object) -> None:
    record.row(
        "A load of 32K tokens beside forward passes",
        forward_passes=passes,
        load_ms=1e3 * load_s,
        times_alone=load_s / alone_s,
        longest_gap_ms=1e3 * ticker.longest_s,
        **columns,
    )


def _durations(ends: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(ends)]


@contextmanager
def running_passes(device: Device, forward: Stream, launch_pass: Callable[[], object]) -> Iterator[list[float]]:
    """Launch forward passes until the context ends, on a thread that does as SGLang's scheduler when it overlaps: it
    launches a pass, and waits for the one before. Yield the times at which passes ended, in seconds: one at first, and
    at least one more when the context has ended."""
    is_over, has_begun = threading.Event(), threading.Event()
    ends: list[float] = []

    def launch() -> Event:
        forward.wait_event(device.current_stream().record_event())
        device.launch(forward, launch_pass)
        return device.mark(forward)

    def work() -> None:
        try:
            launched: Event | None = launch()
            while launched is not None:
                following = None if is_over.is_set() else launch()
                launched.synchronize()
                ends.append(time.perf_counter())
                has_begun.set()
                launched = following
        finally:
            has_begun.set()

    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(work)
        has_begun.wait()
        try:
            yield ends
        finally:
            is_over.set()
        done.result()
