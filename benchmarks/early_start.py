"""Measures what an early start could save: computing while the last pages are still decoded and restored.

    python -m benchmarks.early_start [--tokens 2048] [--gbps 0.02,0.1,1] [--json OUT]

Real SGLang in device mode, on the real model, fetches stored prompts over links of several speeds (`uint8`, HEVC). Each
request's timeline says how long its prefix took to be in the pool after the last byte had come (`behind`), and how long
its other tokens took to compute (`prefill`). Starting when all bytes are here saves at most the smaller of the two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine, versions
from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.report import make_parser, make_table, write_json
from harness.engine import SGLangServer, device_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.calibrate.model import cut_windows, prompt_start, tokenise
from sgl_kvfetch.timeline import TIMELINE_ENV, Span, read_spans

_NUM_PROMPTS = 4
_PAGE_SIZE = 64
_TIMEOUT_S = 900


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.early_start", __doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompts")
    parser.add_argument("--gbps", default="0.02,0.1,1", help="links")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    rows = list(_measure(args))
    names = ("TTFT", "transmit", "behind", "prefill", "saves at most")
    lines = [(row["gbps"], *(f"{row[name]:.2f} s" for name in names)) for row in rows]
    Console().print(make_table("medians", ("Gbps", *names), lines))
    if args.json:
        write_json(args.json, {"rows": rows, "machine": machine(), "versions": versions()})
    return 0


def _measure(args: argparse.Namespace) -> Sequence[dict[str, Any]]:
    from transformers import AutoTokenizer

    model = real_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    windows = cut_windows([tokenise(tokenizer, prose())], _NUM_PROMPTS + 1, args.tokens, prompt_start(tokenizer))
    warm_up, *prompts = (window.tolist() for window in windows)
    num_pages = (args.tokens - 1) // _PAGE_SIZE  # the last token is always computed
    sizes = {"--context-length": 2 * args.tokens, "--max-total-tokens": 6 * args.tokens, "--page-size": _PAGE_SIZE}
    flags = [str(word) for flag in sizes.items() for word in flag]
    config = {"codec": "hevc", "quantiser": "uint8", "fetch_timeout_s": 600}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "store")
        with StoreProcess(directory) as store:
            extra_args = [*device_args(store.url, **config), *flags]
            with SGLangServer(model, extra_args=extra_args, request_timeout_s=_TIMEOUT_S) as server:
                for prompt in prompts:
                    server.generate(input_ids=prompt[: num_pages * _PAGE_SIZE], max_new_tokens=1)
                wait_until_written(server, len(prompts) * num_pages, timeout_s=_TIMEOUT_S)
        for gbps in args.gbps.split(","):
            timeline = Path(folder, f"timeline-{gbps}")
            with StoreProcess(directory, extra_args=["--link-gbps", gbps]) as store:
                extra_args, env = [*device_args(store.url, **config), *flags], {TIMELINE_ENV: str(timeline)}
                with SGLangServer(model, extra_args=extra_args, env=env, request_timeout_s=_TIMEOUT_S) as server:
                    server.generate(input_ids=warm_up, max_new_tokens=1)
                    ttft_s = [server.generate(input_ids=prompt, max_new_tokens=1).ttft_s for prompt in prompts]
                    server.stop()  # which writes the last spans
            spans = [span for file in Path(folder).glob(f"{timeline.name}.*") for span in read_spans(file)]
            rows.append({"gbps": gbps, "TTFT": statistics.median(ttft_s), **bounds(spans)})
    return rows


def bounds(spans: Sequence[Span]) -> dict[str, float]:
    """Return medians over all fetched requests, in seconds."""
    found = []
    for request in {span.request for span in spans if span.stage == "transmit"}:
        own = [span for span in spans if span.request == request]
        transmits = [span for span in own if span.stage == "transmit"]
        last_byte_s = max(span.end_s for span in transmits)
        behind = max(span.end_s for span in own if span.stage == "parked") - last_byte_s
        prefill = sum(span.end_s - span.start_s for span in own if span.stage == "prefill")
        found.append((last_byte_s - min(span.start_s for span in transmits), behind, prefill, min(behind, prefill)))
    names = ("transmit", "behind", "prefill", "saves at most")
    return dict(zip(names, map(statistics.median, zip(*found, strict=True)), strict=True))


if __name__ == "__main__":
    sys.exit(main())
