"""Measures the time to first token of multi-turn conversations with SGLang, and how much the cache saves.

    python -m benchmarks.sharegpt --dataset FILE --url http://127.0.0.1:30000
    python -m benchmarks.sharegpt --dataset FILE --launch --json out.json

See ``--help``.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from rich.console import Console

from benchmarks import launch, live
from benchmarks.dataset import DatasetError, read_dataset
from benchmarks.measure import BenchmarkError, Run, Workload
from benchmarks.options import Options, parse_options
from benchmarks.plot import plot_ttft
from benchmarks.report import print_table, to_json, write_json
from benchmarks.server_facts import ServerUnreachable
from benchmarks.tokens import TokenizerError
from harness.engine import ServerError

EXIT_FAILURES = 1
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark. Return the exit code: 0, 1 if requests failed, 2 on an error, 130 if interrupted."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    console = Console(soft_wrap=True, highlight=False)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        return _benchmark(options, console)
    except (DatasetError, TokenizerError, BenchmarkError, ServerUnreachable, ServerError, TimeoutError) as e:
        console.print(f"error: {e}", style="red", markup=False)
        return EXIT_ERROR
    except KeyboardInterrupt:
        console.print("interrupted; all started processes are stopped")
        return EXIT_INTERRUPTED


def _benchmark(options: Options, console: Console) -> int:
    started_s = time.monotonic()
    dataset = read_dataset(options.dataset)
    if options.dataset_answers and dataset.kind != "sharegpt":
        raise DatasetError(f"--answers dataset: {options.dataset} is {dataset.kind}, which has no answers; use 'model'")
    workload = Workload(options, dataset)
    runs: list[Run] = []
    if options.url is not None:
        method = live.METHOD
        runs.append(live.live_run(workload, console))
    else:
        method = launch.METHOD
        with contextlib.closing(launch.launch_runs(workload, console)) as started:
            runs.extend(started)
    duration_s = time.monotonic() - started_s
    print_table(runs, console)
    if options.json_path is not None:
        write_json(options.json_path, to_json(runs, workload, method, duration_s))
        console.print(f"wrote {options.json_path}")
    if options.plot_path is not None:
        plot_ttft(options.plot_path, runs, _subtitle(workload))
        console.print(f"wrote {options.plot_path}")
    console.print(f"took {duration_s:.0f} s")
    return EXIT_FAILURES if any(run.stats.failures for run in runs) else 0


def _subtitle(workload: Workload) -> str:
    arrivals = workload.options.arrivals
    load = (
        f"{arrivals.concurrency} conversations at a time"
        if arrivals.concurrency
        else f"{arrivals.request_rate:g} requests/s (Poisson)"
    )
    return (
        f"{workload.options.dataset.name}: {len(workload.conversations)} conversations, "
        f"{workload.num_requests} requests, {load}"
    )


def _terminated(signum: int, frame: object) -> NoReturn:
    # Raise an exception, so that servers, store and directories are cleaned up as usual.
    sys.exit(EXIT_TERMINATED)


if __name__ == "__main__":
    sys.exit(main())
