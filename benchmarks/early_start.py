"""Measures what an early start saves: computing while the last pages are still decoded and restored.

    python -m benchmarks.early_start [--tokens 2048] [--rest 256] [--gbps 0.1,1] [--rounds 3] [--json OUT]

Two servers with the real model run SGLang in device mode, one with ``early_start`` and one without. They fetch the same
stored prefixes (`uint8`, HEVC) over a link and compute the rest of each prompt, by turns. ``waited`` is how long a
forward pass waited for layers, on average: for so long, nothing else was computed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import machine, versions
from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.report import make_parser, make_table, write_json
from harness.engine import SGLangServer, device_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.calibrate.text import cut_windows, prompt_start, tokenise

_NUM_PROMPTS = 4
_PAGE_SIZE = 64
_TIMEOUT_S = 900
_WARM_UP = (48, 100, 200, 400)  # tokens computed first, so that the server knows how fast it computes


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.early_start", __doc__)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the prompts")
    parser.add_argument("--rest", type=int, default=256, help="how many of them are not stored")
    parser.add_argument("--gbps", default="0.1,1", help="links")
    parser.add_argument("--rounds", type=int, default=3, help="how often each prompt is fetched")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    rows = list(_measure(args))
    lines = [
        (
            row["gbps"],
            f"{statistics.median(row['late_s']):.2f} s",
            f"{statistics.median(row['early_s']):.2f} s",
            f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
            f"{row['whole']:.0f} of {len(row['early_s'])}",
            f"{row['waited_s']:.2f} s",
        )
        for row in rows
    ]
    names = ("Gbps", "TTFT", "early", "early to not", "started early", "waited")
    Console().print(make_table("medians; ratios of pairs", names, lines))
    if args.json:
        write_json(args.json, {"rows": rows, "machine": machine(), "versions": versions()})
    return 0


def _measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from transformers import AutoTokenizer

    model = real_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    windows = cut_windows([tokenise(tokenizer, prose())], _NUM_PROMPTS + 1, args.tokens, prompt_start(tokenizer))
    warm_up, *prompts = (window.tolist() for window in windows)
    num_pages = (args.tokens - args.rest) // _PAGE_SIZE
    sizes = {"--context-length": 2 * args.tokens, "--max-total-tokens": 6 * args.tokens, "--page-size": _PAGE_SIZE}
    flags = [str(word) for flag in sizes.items() for word in flag]
    config: dict[str, Any] = {"codec": "hevc", "quantiser": "uint8", "fetch_timeout_s": 600}
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder, "store")
        with StoreProcess(directory) as store:
            extra_args = [*device_args(store.url, **config), *flags]
            with SGLangServer(model, extra_args=extra_args, request_timeout_s=_TIMEOUT_S) as server:
                for prompt in prompts:
                    server.generate(input_ids=prompt[: num_pages * _PAGE_SIZE], max_new_tokens=1)
                wait_until_written(server, len(prompts) * num_pages, timeout_s=_TIMEOUT_S)
        for gbps in args.gbps.split(","):
            with ExitStack() as stack:
                store = stack.enter_context(StoreProcess(directory, link_gbps=[float(gbps)]))
                servers = []
                for is_early in (False, True):
                    extra_args = [
                        *device_args(store.url, **config, mode="read_only", device={"early_start": is_early}),
                        *flags,
                    ]
                    server = SGLangServer(model, extra_args=extra_args, request_timeout_s=_TIMEOUT_S)
                    servers.append(stack.enter_context(server))
                    for num_tokens in _WARM_UP:
                        server.generate(input_ids=warm_up[num_tokens : 2 * num_tokens], max_new_tokens=1)
                    server.generate(input_ids=prompts[0], max_new_tokens=1)
                late, early = servers
                yield {"gbps": gbps, **_compare(late, early, prompts, args.rounds)}


def _compare(late: SGLangServer, early: SGLangServer, prompts: Sequence[list[int]], num_rounds: int) -> dict[str, Any]:
    """Fetch each prompt on both servers by turns. Raises ValueError if their answers differ."""
    ttft_s: dict[SGLangServer, list[float]] = {late: [], early: []}
    before = _passes(early)
    for number in range(num_rounds):
        for server in ttft_s:
            server.flush()
        for index, prompt in enumerate(prompts):
            answers = set()
            for server in list(ttft_s)[:: 1 if (number + index) % 2 else -1]:
                answer = server.generate(input_ids=prompt, max_new_tokens=8)
                ttft_s[server].append(answer.ttft_s)
                answers.add(tuple(answer.output_ids))
            if len(answers) > 1:
                raise ValueError(f"prompt {index} has different answers: {answers}")
    whole, num_passes, waited_s = (now - then for now, then in zip(_passes(early), before, strict=True))
    ratios = sorted(e / x for x, e in zip(ttft_s[late], ttft_s[early], strict=True))
    return {
        "late_s": ttft_s[late],
        "early_s": ttft_s[early],
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "whole": whole,
        "waited_s": waited_s / num_passes if num_passes else 0.0,
    }


def _passes(server: SGLangServer) -> tuple[float, float, float]:
    """Return how many passes with early starts were whole, how many there were, and how long they waited together."""
    text = server.metrics()
    wait = "sgl_kvfetch_early_wait_seconds"
    whole = read_metric(text, "sgl_kvfetch_early_passes_total", result="whole")
    return whole, read_metric(text, f"{wait}_count"), read_metric(text, f"{wait}_sum")


if __name__ == "__main__":
    sys.exit(main())
