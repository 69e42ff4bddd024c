"""Measures prompts that have left the device's pool, but not this machine's memory: SGLang's own host tier beside
``memory_cache``, which keeps what was written as it is coded.

    python -m benchmarks.memory_tiers [--model PATH --profile FILE] [--tokens 1024,4096] [--json OUT]

Each server runs SGLang on the real model. Its pool holds two prompts. It computes some, and then gets all but the last
two again, in the same order. None of ``memory_cache`` is read from its store: the bytes on the wire are counted, too.
Capacities are by the bytes that a prompt takes in either memory: 16 bits a value in the host tier. ``--stored`` is a
method of `benchmarks.ttft`: what ``memory_cache`` has.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import fast_dtype, machine, versions
from benchmarks.report import make_parser, make_table, run_and_report, settings, whole_number, whole_numbers
from benchmarks.traffic import kvfetch_traffic
from benchmarks.ttft import PAGE_SIZE, TIMEOUT_S, add_model_arguments, make_prompts, methods, model_and_profile
from harness.engine import SGLangServer, device_args, host_tier_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess

GiB = 1 << 30
CAPACITY = 2 * GiB
_IN_POOL = 2  # prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.memory_tiers", __doc__)
    add_model_arguments(parser)
    parser.add_argument("--tokens", type=whole_numbers, default="1024,4096", help="prompt lengths")
    parser.add_argument("--prompts", type=whole_number, default=4, help="of each length that are asked for again")
    parser.add_argument("--stored", choices=methods(Path()), default="ours (always fetched)")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return run_and_report(run, parser.parse_args(argv), 100)


def run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    model, profile = model_and_profile(args)
    args.prompts += _IN_POOL - 1  # make_prompts adds one
    rows: list[dict[str, Any]] = []
    for length, prompts in make_prompts(model, args).items():
        for name, found in (
            ("SGLang's host tier", _host_tier(model, prompts)),
            ("memory_cache", _memory_cache(model, prompts, methods(profile)[args.stored] or {})),
        ):
            rows.append({"memory": name, "tokens": length, **found, "prompts": int(CAPACITY // found["prompt_bytes"])})
    cells = (
        (
            row["memory"],
            f"{row['tokens']:,}",
            f"{row['computed_s']:.2f}",
            f"{row['again_s']:.2f}",
            f"{row['prompt_bytes'] / 1e6:.1f}",
            f"{row['prompts']:,}",
        )
        for row in rows
    )
    columns = "memory", "tokens", "computed, s", "again, s", "MB a prompt", "prompts in 2 GiB"
    console.print(make_table("Time to first token of prompts that have left the pool", columns, cells))
    return {
        "benchmark": "memory_tiers",
        "settings": settings(args),
        "dtype": fast_dtype(),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _flags(prompts: Sequence[list[int]]) -> list[str]:
    length = len(prompts[0])
    pool = ["--max-total-tokens", str(_IN_POOL * (length + PAGE_SIZE))]
    return ["--dtype", fast_dtype(), "--context-length", str(length + 64), *pool]


def _host_tier(model: Path, prompts: Sequence[list[int]]) -> dict[str, float]:
    from transformers import AutoConfig

    flags = [*_flags(prompts), *host_tier_args(host_pool_gb=1)]
    with SGLangServer(model, extra_args=flags, request_timeout_s=TIMEOUT_S) as server:
        found = _ask_twice(server, prompts, lambda _: None)
    config = AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    return found | {"prompt_bytes": 2 * values * len(prompts[0])}


def _memory_cache(model: Path, prompts: Sequence[list[int]], config: dict[str, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="kvfetch-tiers-") as folder, StoreProcess(folder) as store:
        flags = [*_flags(prompts), *device_args(store.url, **config, memory_cache=CAPACITY)]
        with SGLangServer(model, extra_args=flags, request_timeout_s=TIMEOUT_S) as server:
            pages = len(prompts[0]) // PAGE_SIZE
            found = _ask_twice(server, prompts, lambda count: wait_until_written(server, count * pages, TIMEOUT_S))
            metrics = server.metrics()
    wire_bytes = kvfetch_traffic("", metrics).wire_bytes
    if wire_bytes:
        raise RuntimeError(f"{wire_bytes} bytes came from the store")
    held_bytes = read_metric(metrics, "sgl_kvfetch_memory_cache_bytes")
    return found | {"prompt_bytes": round(held_bytes / len(prompts))}


def _ask_twice(
    server: SGLangServer, prompts: Sequence[list[int]], await_written: Callable[[int], None]
) -> dict[str, float]:
    """Return the medians of the times to first token, computed and the second time."""
    computed, again = [], []
    for count, prompt in enumerate(prompts, 1):
        computed.append(server.generate(input_ids=prompt, max_new_tokens=1).ttft_s)
        await_written(count)
    for prompt in prompts[:-_IN_POOL]:
        answer = server.generate(input_ids=prompt, max_new_tokens=1)
        if answer.cached_tokens < 0.9 * len(prompt):
            raise RuntimeError(f"only {answer.cached_tokens} of {len(prompt)} tokens came from memory")
        again.append(answer.ttft_s)
    return {"computed_s": statistics.median(computed[1:]), "again_s": statistics.median(again)}


if __name__ == "__main__":
    sys.exit(main())
