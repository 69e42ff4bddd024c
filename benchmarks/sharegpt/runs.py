"""Measures servers that are started for each backend."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import psutil  # type: ignore[import-untyped]
from rich.console import Console

from benchmarks.processes import usage
from benchmarks.sharegpt.backends import Backend, open_backend, wait_until_settled
from benchmarks.sharegpt.workload import Run, Workload, ask_facts
from harness.engine import SGLangServer
from harness.models import make_tiny_llama


@dataclass(frozen=True)
class CpuUse:
    """CPU seconds since some time in the past: of all cores that we may use, and of this process and its children."""

    at_s: float
    all_s: float
    ours_s: float

    @classmethod
    def now(cls) -> Self:
        cores = os.sched_getaffinity(0)
        busy_s = 0.0
        for core, times in enumerate(psutil.cpu_times(percpu=True)):
            if core in cores:
                # A guest's time is part of user time.
                busy_s += sum(times) - times.idle - times.iowait - times.guest - times.guest_nice
        return cls(time.monotonic(), busy_s, usage(os.getpid()).cpu_s)


def other_cores(before: CpuUse, after: CpuUse) -> float:
    """Return how many cores other processes used on average in between. Our child processes must outlive it."""
    others_s = (after.all_s - before.all_s) - (after.ours_s - before.ours_s)
    return max(0.0, others_s / (after.at_s - before.at_s))


METHOD = (
    "Per backend: a first SGLang process serves all conversations and fills the store; when its background writes have "
    "ended it is stopped, and a fresh process (device and host tier empty) serves the same conversations again, which "
    "is what is measured. 'none' has nothing to fill. Histories repeat the answers of the very first run, so that "
    "all runs send the same prompts. Each process is warmed up with two requests that are not counted."
)


class Launcher:
    """Starts SGLang and a store for each backend: fills the store, starts a fresh SGLang, and measures it."""

    def __init__(self, workload: Workload, args: argparse.Namespace, console: Console) -> None:
        self._workload, self._args, self._console = workload, args, console
        self._model: str | None = args.model

    def runs(self) -> list[Run]:
        """Return one run per backend. Everything started is stopped and removed, also when this raises."""
        with TemporaryDirectory(prefix="kvfetch-bench-", ignore_cleanup_errors=True) as folder:
            self._console.print(f"model: {self._model or 'a new small random Llama'}")
            self._model = self._model or str(make_tiny_llama(Path(folder, "model")))
            return [self._run(name) for name in self._args.backends]

    def _run(self, name: str) -> Run:
        with open_backend(name, self._args.store, self._args.kvfetch) as backend:
            self._console.print(f"[bold]{name}[/]: {backend.description}")
            fill = self._fill(backend) if backend.fills else None
            with self._server(backend) as server:
                metrics: list[str] = []
                cpu: list[CpuUse] = []

                def look() -> None:
                    metrics.append(server.metrics())
                    cpu.append(CpuUse.now())

                result = self._workload.send(server.url, f"{name}: measure", before=look)
                look()
            assert self._workload.server is not None
            before, after = metrics
            traffic = backend.read(before, after, result.storage_tokens // self._workload.server.page_size)
            return Run(name, backend.description, result, traffic, other_cores(*cpu), fill)

    def _fill(self, backend: Backend) -> dict[str, Any]:
        started_s = time.monotonic()
        with self._server(backend) as server:
            before = server.metrics()
            result = self._workload.send(server.url, f"{backend.name}: fill", fills=True)
            settle_s = wait_until_settled(backend, server)
            stored = backend.stored(before, server.metrics())
        failures = sum(record.error is not None for record in result.records)
        facts = {
            "requests": len(result.records),
            "failures": failures,
            "duration_s": time.monotonic() - started_s,
            "settle_s": settle_s,
        }
        dropped = sum(count for what, count in stored.items() if what.startswith("pages_dropped"))
        if failures or dropped:
            self._console.print(f"[yellow]filling it, {failures} requests failed and {dropped} pages were dropped[/]")
        return facts | stored

    @contextmanager
    def _server(self, backend: Backend) -> Iterator[SGLangServer]:
        """Run a fresh SGLang. The first server of all determines how long the prompts may be."""
        assert self._model is not None
        flags = [*backend.flags, *self._args.sglang_args]
        with SGLangServer(self._model, extra_args=flags, env=backend.env, request_timeout_s=60.0) as server:
            self._workload.prepare(ask_facts(server.url))
            yield server
