"""Measures how fetches slow down requests that need no fetch.

    python -m benchmarks.interference --launch --json out.json --plot timeline.png

See ``--help``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.contention import CpuUse, other_cores
from benchmarks.interference.load import LONG_TIMEOUT_S, Plan, Run, make_plan, send
from benchmarks.interference.options import HEVC_MODE, NO_FETCHES, Options, parse_options
from benchmarks.interference.pinning import everything_on_one_core, first_core, give_schedulers_a_core
from benchmarks.interference.plot import plot_timeline
from benchmarks.interference.report import METHOD, make_rows, make_table
from benchmarks.interference.spans import merged, read_spans
from benchmarks.machine import machine, versions
from benchmarks.report import write_json
from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from sgl_kvfetch.timeline import FLUSH_S, TIMELINE_ENV

PAGE_SIZE = 16
_PATCHES = Path(__file__).parent.parent / "patches"
_PATCHED = ("threads", "blocking")
_HEVC_CODEC = "hevc"
_FILE_COLUMNS = 130


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_options(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    plan = make_plan(options)
    pinnings = _pinnings(options)
    runs: dict[bool, dict[str, list[Run]]] = {pinned: {mode: [] for mode in options.modes} for pinned in pinnings}
    with tempfile.TemporaryDirectory(prefix="kvfetch-interference-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        model = options.model or str(make_tiny_llama(folder / "model"))
        for codec in {_codec(mode, options) for mode in options.modes}:
            with console.status(f"storing the long prompts: {codec}"):
                _fill(model, folder / codec, plan, codec)
        for round_idx in range(options.rounds):
            # Each round has another order, so that no mode is always first if the machine's speed changes.
            first = round_idx % len(options.modes)
            for mode in options.modes[first:] + options.modes[:first]:
                for pinned in pinnings:
                    with console.status(f"round {round_idx + 1} of {options.rounds}: {mode}{', pinned' * pinned}"):
                        runs[pinned][mode].append(_measure(mode, model, folder, plan, options, pinned))
    rows = {pinned: make_rows(of_modes) for pinned, of_modes in runs.items()}
    for pinned in pinnings:
        console.print(make_table(rows[pinned], pinned))
    console.print(METHOD)
    if options.plot_path is not None:
        _plot(options.plot_path, runs[False]["device"][-1], options)
        console.print(f"wrote {options.plot_path}")
    if options.json_path is not None:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(options).items()}
        write_json(
            options.json_path,
            {
                **settings,
                "method": METHOD,
                **{"modes" if pinned else "modes_unpinned": rows[pinned] for pinned in pinnings},
                "machine": machine(),
                "versions": versions(),
            },
        )
        console.print(f"wrote {options.json_path}")
    return 0


def _pinnings(options: Options) -> tuple[bool, ...]:
    return {"yes": (True,), "no": (False,), "both": (True, False)}[options.pinned]


def _codec(mode: str, options: Options) -> str:
    return _HEVC_CODEC if mode == HEVC_MODE else options.codec


def _fill(model: str, directory: Path, plan: Plan, codec: str) -> None:
    with (
        StoreProcess(directory) as store,
        SGLangServer(model, extra_args=hicache_args(store.url, codec=codec)) as server,
    ):
        for number, prompt in enumerate(plan.long, 1):
            server.generate(input_ids=prompt.tokens, max_new_tokens=1)
            wait_until_written(server, number * (len(prompt.tokens) // PAGE_SIZE))


def _measure(mode: str, model: str, folder: Path, plan: Plan, options: Options, pinned: bool) -> Run:
    scheduler_core = first_core()
    with (
        everything_on_one_core() if pinned else nullcontext(),
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        StoreProcess(folder / _codec(mode, options), extra_args=["--link-gbps", str(options.link_gbps)]) as store,
    ):
        timeline = Path(scratch, "timeline")
        env = {TIMELINE_ENV: str(timeline)} | ({"OMP_NUM_THREADS": "1"} if pinned else {})
        if mode in _PATCHED:
            env["KVFETCH_PATCH"] = mode
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_PATCHES), os.environ.get("PYTHONPATH"))))
        with SGLangServer(model, extra_args=_flags(mode, store.url, options.threshold), env=env) as server:
            server.generate(input_ids=[1] * options.short_tokens, max_new_tokens=options.new_tokens)  # warm up
            if pinned:
                give_schedulers_a_core(scheduler_core)
            before = CpuUse.now()
            long = [] if mode in NO_FETCHES else plan.long
            short_requests, long_requests = asyncio.run(send(server.url, plan.short, long, options.new_tokens))
            others = other_cores(before, CpuUse.now())
            time.sleep(2 * FLUSH_S)
        files = sorted(timeline.parent.glob(f"{timeline.name}.0*"))  # the scheduler's and its data plane's
        spans = [span for file in files for span in read_spans(file)]
    return Run(short_requests, long_requests, spans, others)


def _flags(mode: str, url: str, threshold: int) -> list[str]:
    # Nothing is written, and a fetch may take as long as the link needs.
    settings: Mapping[str, Any] = {
        "mode": "read_only",
        "fetch_timeout_s": LONG_TIMEOUT_S,
        "prefetch_threshold": threshold,
    }
    match mode:
        case "none":
            return []
        case "host":
            return hicache_args(url, **settings)
    # With such a slow link, computing a small model's prompts would be faster than fetching them.
    return device_args(url, recompute="never", **settings)


def _plot(path: Path, run: Run, options: Options) -> None:
    requests = sorted([*run.short, *run.long], key=lambda request: request.sent_s)
    subtitle = (
        f"device mode: prompts of {options.long_tokens} tokens stored as {options.codec} behind "
        f"{options.link_gbps:g} Gbps, new prompts of {options.short_tokens} tokens"
    )
    plot_timeline(path, merged(requests, run.spans), {request.name for request in run.long}, subtitle)


if __name__ == "__main__":
    sys.exit(main())
