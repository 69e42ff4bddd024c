"""Measures how fetches slow down requests that need no fetch.

    python -m benchmarks.interference --launch --json out.json --plot timeline.png

Sends a stream of new short prompts, while long prompts that were stored before are fetched over a slow link. Runs these
modes in turn, several times: none (only the short prompts, without our plugin), idle (the same in device mode), device
(device mode) and host (HiCache's host tier and SGLang's own prefetch). Every mode gets the same prompts at the same
times, and empty caches.

--separate adds device_hevc: device mode, with the same prompts stored as video. Without a hardware decoder, decoding
takes CPU time from the model, so the difference from device separates the cost of decoding from that of scheduling.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

from rich.console import Console

from benchmarks.contention import CpuUse, other_cores
from benchmarks.interference.load import LONG_TIMEOUT_S, Plan, Run, make_plan, send
from benchmarks.interference.pinning import everything_on_one_core, first_core, give_schedulers_a_core
from benchmarks.interference.plot import plot_timeline
from benchmarks.interference.report import METHOD, make_rows, make_table
from benchmarks.interference.spans import merged
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, settings, whole_number, write_json
from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.bitstream.registry import CodecName
from sgl_kvfetch.timeline import FLUSH_S, TIMELINE_ENV, read_spans

PAGE_SIZE = 16
_HEVC_CODEC = "hevc"
_FILE_COLUMNS = 130
MODES = ("none", "idle", "device", "host")
_NO_FETCHES = ("none", "idle")
_HEVC_MODE = "device_hevc"
_PINNINGS = {"yes": (True,), "no": (False,), "both": (True, False)}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_COLUMNS)
    plan = make_plan(options)
    pinnings = _PINNINGS[options.pinned]
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
        write_json(
            options.json_path,
            {
                **settings(options),
                "method": METHOD,
                **{"modes" if pinned else "modes_unpinned": rows[pinned] for pinned in pinnings},
                "machine": machine(),
                "versions": versions(),
            },
        )
        console.print(f"wrote {options.json_path}")
    return 0


def _codec(mode: str, options: argparse.Namespace) -> str:
    return _HEVC_CODEC if mode == _HEVC_MODE else str(options.codec)


def _fill(model: str, directory: Path, plan: Plan, codec: str) -> None:
    with (
        StoreProcess(directory) as store,
        SGLangServer(model, extra_args=hicache_args(store.url, codec=codec, host_pool_gb=1)) as server,
    ):
        for number, prompt in enumerate(plan.long, 1):
            server.generate(input_ids=prompt.tokens, max_new_tokens=1)
            wait_until_written(server, number * (len(prompt.tokens) // PAGE_SIZE))


def _measure(mode: str, model: str, folder: Path, plan: Plan, options: argparse.Namespace, pinned: bool) -> Run:
    scheduler_core = first_core()
    with (
        everything_on_one_core() if pinned else nullcontext(),
        tempfile.TemporaryDirectory(dir=folder) as scratch,
        StoreProcess(folder / _codec(mode, options), link_gbps=[options.link_gbps]) as store,
    ):
        timeline = Path(scratch, "timeline")
        env = {TIMELINE_ENV: str(timeline)} | ({"OMP_NUM_THREADS": "1"} if pinned else {})
        with SGLangServer(model, extra_args=_flags(mode, store.url, options.threshold), env=env) as server:
            server.generate(input_ids=[1] * options.short_tokens, max_new_tokens=options.new_tokens)  # warm up
            if pinned:
                give_schedulers_a_core(scheduler_core)
            before = CpuUse.now()
            long = [] if mode in _NO_FETCHES else plan.long
            short_requests, long_requests = asyncio.run(send(server.url, plan.short, long, options.new_tokens))
            others = other_cores(before, CpuUse.now())
            time.sleep(2 * FLUSH_S)
        files = sorted(timeline.parent.glob(f"{timeline.name}.0*"))  # the scheduler's and its data plane's
        spans = [span for file in files for span in read_spans(file)]
    return Run(short_requests, long_requests, spans, others)


def _flags(mode: str, url: str, threshold: int) -> list[str]:
    # Nothing is written, and a fetch may take as long as the link needs.
    config: dict[str, Any] = {"mode": "read_only", "fetch_timeout_s": LONG_TIMEOUT_S, "prefetch_threshold": threshold}
    match mode:
        case "none":
            return []
        case "host":
            return hicache_args(url, host_pool_gb=1, **config)
    # With such a slow link, computing a small model's prompts would be faster than fetching them.
    return device_args(url, **config)


def _plot(path: Path, run: Run, options: argparse.Namespace) -> None:
    requests = sorted([*run.short, *run.long], key=lambda request: request.sent_s)
    subtitle = (
        f"device mode: prompts of {options.long_tokens} tokens stored as {options.codec} behind "
        f"{options.link_gbps:g} Gbps, new prompts of {options.short_tokens} tokens"
    )
    plot_timeline(path, merged(requests, run.spans), {request.name for request in run.long}, subtitle)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.interference", __doc__)
    parser.add_argument("--launch", action="store_true", required=True, help="start SGLang and store for each run")
    parser.add_argument("--model", help="a model's directory; else a small random Llama")
    parser.add_argument("--json", type=Path, metavar="FILE", dest="json_path", help="where to write the figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", dest="plot_path", help="draw a timeline of device mode's last run"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="which to run; none is required")
    parser.add_argument("--separate", action="store_true", help=f"add {_HEVC_MODE}")
    parser.add_argument("--rounds", type=whole_number, default=5, help="of all modes")
    parser.add_argument("--duration", type=float, default=20.0, dest="duration_s", help="seconds per run")
    parser.add_argument("--short-rate", type=float, default=3.0, help="short prompts per second")
    parser.add_argument("--short-tokens", type=whole_number, default=64, help="of a short prompt")
    parser.add_argument("--new-tokens", type=whole_number, default=16, help="for a short prompt")
    parser.add_argument("--long-prompts", type=whole_number, default=4, help="per run")
    parser.add_argument("--long-tokens", type=whole_number, default=1536, help="of a long prompt")
    parser.add_argument(
        "--threshold",
        type=int,
        default=256,
        help="shorter prompts are not looked up; the default is SGLang's. If it is below --short-tokens, every short "
        "prompt waits for a lookup over the link that the fetches use",
    )
    parser.add_argument("--link-gbps", type=float, default=0.01, help="the store's link; a fetch should take seconds")
    parser.add_argument(
        "--codec",
        choices=get_args(CodecName),
        default="zstd",
        help=f"codec of stored prompts, except for {_HEVC_MODE}; zstd decodes fastest",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and their times")
    parser.add_argument(
        "--pinned",
        choices=("yes", "no", "both"),
        default="both",
        help="run the scheduler's main thread alone on one core and the rest on another",
    )
    options = parser.parse_args(argv)
    options.modes = tuple(dict.fromkeys(options.modes.split(",") + [_HEVC_MODE] * options.separate))
    if unknown := set(options.modes) - {*MODES, _HEVC_MODE}:
        parser.error(f"--modes: unknown are {', '.join(sorted(unknown))}; known are {', '.join((*MODES, _HEVC_MODE))}")
    if "none" not in options.modes:
        parser.error("--modes: 'none' is required, since the others are compared with it")
    if options.plot_path is not None and ("device" not in options.modes or options.pinned == "yes"):
        parser.error("--plot needs the mode 'device', and a run on all cores, which --pinned yes leaves out")
    if options.new_tokens < 2:
        parser.error("--new-tokens: expected at least 2, to measure the time per token")
    return options


if __name__ == "__main__":
    sys.exit(main())
