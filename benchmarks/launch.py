"""``--launch``: for each backend, start SGLang and a store, fill the store, start a fresh SGLang, and measure it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.backends import Backend, FileStorage, KVFetchStorage, NoStorage, wait_until_settled
from benchmarks.contention import CpuUse, other_cores
from benchmarks.measure import Run, Workload, make_run
from benchmarks.options import Options
from benchmarks.server_facts import ServerClient
from harness.engine import SGLangServer
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

METHOD = (
    "Per backend: a first SGLang process serves all conversations and fills the store; when its background writes have "
    "ended it is stopped, and a fresh process (device and host tier empty) serves the same conversations again, which "
    "is what is measured. 'none' has nothing to fill. Histories repeat the answers of the very first run, so that "
    "all runs send the same prompts. Each process is warmed up with two requests that are not counted."
)


def launch_runs(workload: Workload, console: Console) -> Generator[Run, None, None]:
    """Yield one run per backend. Everything started is stopped and removed when the iterator ends or is closed."""
    options = workload.options
    with tempfile.TemporaryDirectory(prefix="kvfetch-bench-", ignore_cleanup_errors=True) as folder:
        model = options.model or str(make_tiny_llama(Path(folder, "model")))
        console.print(f"model: {options.model or 'a new small random Llama'}")
        console.print(METHOD)
        first: Run | None = None
        for name in options.backends:
            with _backend(name, options, Path(folder)) as backend:
                run = _run(backend, model, workload, first, console)
            first = first or run
            yield run


@contextmanager
def _backend(name: str, options: Options, folder: Path) -> Iterator[Backend]:
    match name:
        case "none":
            yield NoStorage()
        case "file":
            with tempfile.TemporaryDirectory(prefix="file-", dir=folder) as directory:
                yield FileStorage(Path(directory))
        case _ if options.store is not None:
            yield KVFetchStorage(options.store, options.kvfetch)
        case _:
            args = ["--token", token] if (token := options.kvfetch.get("token")) else []
            with (
                tempfile.TemporaryDirectory(prefix="store-", dir=folder) as directory,
                StoreProcess(directory, extra_args=args) as store,
            ):
                yield KVFetchStorage(store.url, options.kvfetch)


def _run(backend: Backend, model: str, workload: Workload, first: Run | None, console: Console) -> Run:
    console.print(f"[bold]{backend.name}[/]: {backend.description}")
    fill = _fill(backend, model, workload, console) if backend.fills else None
    with _server(backend, model, workload, console) as server:
        metrics: list[str] = []
        cpu: list[CpuUse | None] = []

        def look() -> None:
            metrics.append(server.metrics())
            cpu.append(CpuUse.now())

        result = workload.send(server.url, workload.options.arrivals, f"{backend.name}: measure", look)
        look()
    assert workload.server is not None
    page_size = workload.server.page_size
    return make_run(
        backend.name,
        backend.description,
        result,
        lambda storage_tokens: backend.read(metrics[0], metrics[1], storage_tokens, page_size),
        first.result if first is not None else None,
        other_cores=other_cores(cpu[0], cpu[1]),
        fill=fill,
    )


def _fill(backend: Backend, model: str, workload: Workload, console: Console) -> dict[str, Any]:
    started_s = time.monotonic()
    with _server(backend, model, workload, console) as server:
        before = server.metrics()
        result = workload.send(server.url, workload.options.fill_arrivals, f"{backend.name}: fill")
        with console.status(f"{backend.name}: waiting for its writes to end"):
            settle_s = wait_until_settled(backend, server)
        stored = backend.stored(before, server.metrics())
    failures = sum(record.error is not None for record in result.records)
    duration_s = time.monotonic() - started_s
    for what, count in stored.items():
        if what.startswith("pages_dropped") and count:
            console.print(f"[yellow]{backend.name}: {count} pages were {what.removeprefix('pages_')}[/]")
    if failures:
        console.print(f"[yellow]{backend.name}: {failures} requests of the fill failed[/]")
    facts = {"requests": len(result.records), "failures": failures, "duration_s": duration_s, "settle_s": settle_s}
    return facts | stored


@contextmanager
def _server(backend: Backend, model: str, workload: Workload, console: Console) -> Iterator[SGLangServer]:
    """Run a fresh SGLang. The first server of all determines how long the prompts may be."""
    server = SGLangServer(
        model, extra_args=[*backend.flags, *workload.options.sglang_args], env=backend.env, request_timeout_s=60.0
    )
    with console.status(f"{backend.name}: starting SGLang"):
        server.start()
    try:
        if workload.prepare(ServerClient(server.url).facts()):
            describe(workload, console)
        yield server
    finally:
        server.stop()


def describe(workload: Workload, console: Console) -> None:
    """Print what will be sent."""
    assert workload.tokens is not None
    wanted = workload.options.max_input_tokens
    capped = "" if wanted == workload.max_input_tokens else f" (the server's limit; {wanted} were requested)"
    console.print(
        f"{workload.options.dataset} ({workload.dataset.kind}): {len(workload.conversations)} conversations, "
        f"{workload.num_requests} requests, prompts of up to {workload.max_input_tokens} tokens{capped}, "
        f"answers of {workload.options.max_new_tokens}"
    )
    console.print(f"token ids: {workload.tokens.description}")
