"""Measures the time to first token over links of several speeds, for several ways to get the prompt's KV cache.

    python -m benchmarks.ttft [--model PATH --profile FILE --text FILE] [--json OUT]

Each method runs real SGLang, in device mode or in host mode (``--mode``). One server computes every prompt and stores
it. Another one, which only reads, first computes a few other prompts, so that it knows its own speed. Then it gets the
stored prompts over a link of limited speed, and its caches are flushed between them.

* computing: without a store;
* raw reuse: the unchanged KV cache, 16 bits per value, with the same client;
* raw or computed: the same, but `recompute` may choose to compute instead;
* CacheGen's recipe: its bins, 32 in each layer, and a general-purpose coder. CacheGen's own arithmetic coder takes
  fewer bytes, but needs a GPU: see docs/codec.md;
* KVFetcher's recipe: the same bins, laid out as frames, in HEVC;
* ours: `klt` at its default target, as servers write it. `recompute` may choose to compute instead;
* ours (always fetched): as ours, but it never computes instead.

A CPU computes a hundred times slower than a GPU, so links are slower here as well: 0.02 to 1 Gbps represent 1 to 40.
SGLang runs the model in bfloat16, or in float32 on a CPU that multiplies matrices faster in float32.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.machine import fast_dtype
from benchmarks.real_model import prose, real_model
from benchmarks.real_profile import PROMPTS_PART, real_profile
from benchmarks.report import make_parser, make_table, no_traceback, whole_numbers, write_json
from harness.engine import SGLangServer, device_args, free_port, hicache_args
from harness.metrics import bytes_read, wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.calibrate.text import cut_windows, part_of, prompt_start, tokenise
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts

_PAGE_SIZE = 16
_COMPUTING = "computing"
_BINS: dict[str, Any] = {"quantiser": "cachegen(k=32;v=32)"}
_NUM_BACKWARDS = 2  # prompts per length whose tokens backwards are other prompts, as long to compute
_TIMEOUT_S = 300
_MODES: dict[str, Callable[..., list[str]]] = {
    "device": device_args,
    "host": partial(hicache_args, prefetch_policy=None, host_pool_gb=1),  # SGLang's default
}
_WIDTH = 120


def methods(profile: Path) -> dict[str, dict[str, Any] | None]:
    """Return the keys of our config for each method; None if SGLang runs without our plugin."""
    ours = {"profile": str(profile.absolute())}
    return {
        _COMPUTING: None,
        "raw reuse": {"quantiser": "exact", "codec": "raw"},
        "raw or computed": {"quantiser": "exact", "codec": "raw", "recompute": "auto"},
        "CacheGen's recipe": _BINS | {"codec": "zstd"},
        "KVFetcher's recipe": _BINS | {"codec": "hevc"},
        "ours": ours | {"recompute": "auto"},
        "ours (always fetched)": ours,
    }


@dataclass(frozen=True)
class Row:
    """The results of one method, prompt length and link. Percentiles are over the prompts, without the first one: it
    opens connections, and the server learns the link's speed from it."""

    method: str
    prompt_tokens: int
    gbps: float
    first_s: float
    ttft_s: tuple[float, ...]
    wire_bytes: int  # mean per prompt
    cached_tokens: int

    @property
    def p50_s(self) -> float:
        return statistics.median(self.ttft_s)

    @property
    def p95_s(self) -> float:
        """Return the 95th percentile, by nearest rank."""
        return sorted(self.ttft_s)[math.ceil(0.95 * len(self.ttft_s)) - 1]

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "prompt_tokens": self.prompt_tokens,
            "gbps": self.gbps,
            "ttft_s": {"p50": self.p50_s, "p95": self.p95_s, "all": self.ttft_s, "first": self.first_s},
            "wire_bytes": self.wire_bytes,
            "cached_tokens": self.cached_tokens,
        }


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    with no_traceback():
        if args.model and not args.profile:
            raise ConfigError("--model needs --profile")
        model, profile = args.model or real_model(), args.profile or real_profile()
        prompts = _make_prompts(model, args)
    rows: list[Row] = []
    for name, config in methods(profile).items():
        if args.methods and name not in args.methods:
            continue
        console.print(f"{name}: starting SGLang, which computes and stores every prompt")
        for row in _measure(name, config, _MODES[args.mode], model, prompts, args.gbps):
            what = f"{row.method}, {row.prompt_tokens:,} tokens, {row.gbps:g} Gbps"
            console.print(f"{what}: {row.p50_s:.2f} s, the first {row.first_s:.2f} s")
            rows.append(row)
    console.print(_table(rows))
    if args.json:
        about = {"benchmark": "ttft", "mode": args.mode, "model": str(model), "profile": profile.name}
        write_json(args.json, {**about, "dtype": fast_dtype(), "rows": [row.as_json() for row in rows]})
        console.print(f"wrote {args.json}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.ttft", __doc__)
    parser.add_argument("--mode", choices=_MODES, default="device")
    parser.add_argument("--model", type=Path, help="a model's directory; else the real model; needs --profile")
    parser.add_argument("--profile", type=Path, help="that model's profile by kvfetch calibrate; else the real model's")
    parser.add_argument("--text", type=Path, help="text to cut prompts from; else Python's reference")
    parser.add_argument("--part", default=PROMPTS_PART, help="part of the text")
    parser.add_argument("--tokens", type=whole_numbers, default="1024,2048,4096", help="prompt lengths")
    parser.add_argument("--gbps", type=_numbers, default="0.02,0.05,0.1,0.2,0.5,1", help="links")
    parser.add_argument("--prompts", type=int, default=3, help="number per length")
    parser.add_argument("--methods", help="names, separated by commas; else all")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    known = methods(Path())
    args.methods = args.methods.split(",") if args.methods else []
    if unknown := set(args.methods) - set(known):
        parser.error(f"--methods: {', '.join(sorted(unknown))} is unknown; known are {'; '.join(known)}")
    return args


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(",")]


def _make_prompts(model: Path, args: argparse.Namespace) -> dict[int, list[list[int]]]:
    """Return prompts by length, each with another beginning. Each length has one more prompt, for the warm-up."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = read_texts(args.text) if args.text else [prose()]
    tokens = [part_of(tokenise(tokenizer, text), args.part) for text in texts]
    longest = max(args.tokens)
    windows = cut_windows(tokens, len(args.tokens) * (args.prompts + 1), longest, prompt_start(tokenizer))
    cut = iter(window.tolist() for window in windows)
    return {length: [next(cut)[:length] for _ in range(args.prompts + 1)] for length in args.tokens}


def _measure(
    name: str,
    config: dict[str, Any] | None,
    make_flags: Callable[..., list[str]],
    model: Path,
    prompts: dict[int, list[list[int]]],
    links: Sequence[float],
) -> Iterator[Row]:
    port, longest = free_port(), max(prompts)

    def launch(mode: str) -> SGLangServer:
        flags = ["--dtype", fast_dtype(), "--context-length", str(longest + 64), "--max-total-tokens", str(4 * longest)]
        flags += ["--page-size", str(_PAGE_SIZE)]
        if config is not None:
            limited = config | {"mode": mode, "fetch_timeout_s": _TIMEOUT_S}
            flags += make_flags(f"http://127.0.0.1:{port}", **limited)
        return SGLangServer(model, extra_args=flags, request_timeout_s=2 * _TIMEOUT_S)

    with tempfile.TemporaryDirectory(prefix="kvfetch-ttft-") as folder:
        if config is not None:
            with StoreProcess(folder, port=port), launch("read_write") as server:
                _store_all(server, [prompt for several in prompts.values() for prompt in several])
        with launch("read_only") as server:
            with StoreProcess(folder, port=port):
                for prompt in (prompt for several in prompts.values() for prompt in several[:_NUM_BACKWARDS]):
                    server.generate(input_ids=prompt[::-1], max_new_tokens=1)
            if config is None:
                for length, several in prompts.items():
                    row = _ask(server, name, length, several, 0.0)
                    yield from (Row(row.method, length, gbps, row.first_s, row.ttft_s, 0, 0) for gbps in links)
                return
            for gbps in links:
                with StoreProcess(folder, port=port, link_gbps=gbps):
                    for length, several in prompts.items():
                        yield _ask(server, name, length, several, gbps)


def _store_all(server: SGLangServer, prompts: Sequence[list[int]]) -> None:
    num_pages = 0
    for prompt in prompts:
        server.generate(input_ids=prompt, max_new_tokens=1)
        num_pages += len(prompt) // _PAGE_SIZE
        wait_until_written(server, num_pages, timeout_s=2 * _TIMEOUT_S)


def _ask(server: SGLangServer, name: str, length: int, prompts: Sequence[list[int]], gbps: float) -> Row:
    answers = []
    before = ""
    for number, prompt in enumerate(prompts):
        if number == 1:
            before = server.metrics()
        server.flush()
        answers.append(server.generate(input_ids=prompt, max_new_tokens=1))
    measured = answers[1:]
    wire_bytes = bytes_read(before, server.metrics())
    return Row(
        method=name,
        prompt_tokens=length,
        gbps=gbps,
        first_s=answers[0].ttft_s,
        ttft_s=tuple(a.ttft_s for a in measured),
        wire_bytes=wire_bytes // len(measured),
        cached_tokens=round(statistics.mean(a.cached_tokens for a in measured)),
    )


def _table(rows: Sequence[Row]) -> Table:
    links = sorted({row.gbps for row in rows})
    cells = []
    for length, name in dict.fromkeys((row.prompt_tokens, row.method) for row in sorted(rows, key=_by_length)):
        of_link = {row.gbps: row for row in rows if (row.prompt_tokens, row.method) == (length, name)}
        times = (f"{of_link[gbps].p50_s:.2f} ({of_link[gbps].p95_s:.2f})" for gbps in links)
        megabytes = max(row.wire_bytes for row in of_link.values()) / 1e6
        cells.append((f"{length:,}", name, *times, f"{megabytes:.2f}"))
    columns = ("prompt", "method", *(f"{gbps:g} Gbps" for gbps in links), "MB on the wire")
    return make_table("Time to first token in s, p50 (p95)", columns, cells)


def _by_length(row: Row) -> int:
    return row.prompt_tokens


if __name__ == "__main__":
    sys.exit(main())
