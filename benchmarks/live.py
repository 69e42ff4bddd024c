"""Measures a server that is already running."""

from __future__ import annotations

from rich.console import Console

from benchmarks.launch import describe
from benchmarks.measure import Run, Workload, make_run
from benchmarks.server_facts import ServerClient, kvfetch_traffic
from benchmarks.stats import Traffic

METHOD = (
    "One run against a live server, without changing the state of its caches first, after a warm-up of two requests "
    "that are not counted."
)


def live_run(workload: Workload, console: Console) -> Run:
    """Measure the server at ``--url``. Raises ServerUnreachable, TokenizerError and BenchmarkError."""
    url = workload.options.url
    assert url is not None
    client = ServerClient(url, workload.options.api_key)
    facts = client.facts()
    backend = facts.storage_backend
    console.print(f"{url}: {facts.model_path}, SGLang {facts.version}, storage backend {backend or 'none'}")
    console.print(METHOD)
    workload.prepare(facts)
    describe(workload, console)
    before: list[str | None] = []
    result = workload.send(url, workload.options.arrivals, "measure", lambda: before.append(client.metrics()))
    after = client.metrics()

    def traffic(storage_tokens: int) -> Traffic:
        if backend is None:
            return Traffic(0, 0)
        if backend == "kvfetch" and before[0] is not None and after is not None:
            return kvfetch_traffic(before[0], after)
        return Traffic(None, None)

    return make_run(backend or "none", f"live server at {url}", result, traffic, None)
