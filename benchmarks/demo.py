"""The main job, end to end: a prompt's KV cache goes to a remote store as lossless video, and a fresh SGLang takes it
from there. Prints where the prompt's tokens came from, both answers, both times to first token, and what moved.

    python -m benchmarks.demo [--model PATH] [--text FILE] [--profile FILE] [--quantiser NAME] [--codec hevc|...]
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.server_facts import kvfetch_traffic
from sgl_kvfetch.testing.engine import Generation, SGLangServer, hicache_args
from sgl_kvfetch.testing.metrics import wait_until_written
from sgl_kvfetch.testing.models import make_tiny_llama
from sgl_kvfetch.testing.store_process import StoreProcess

PAGE_SIZE = 16


@dataclass(frozen=True)
class Run:
    answer: Generation
    start_s: float
    metrics_before: str
    metrics_after: str


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    with tempfile.TemporaryDirectory(prefix="kvfetch-demo-") as folder:
        model = Path(args.model) if args.model else make_tiny_llama(Path(folder, "model"))
        console.print(f"model: {args.model or 'a small random Llama, made just now'}")
        prompt = _text_prompt(args, model) if args.text else _prompt(0, args.prompt_tokens)
        with StoreProcess(args.store or Path(folder, "store")) as store:
            console.print(f"store: {store.url}, over {args.store or 'an empty directory'}")
            settings = {"profile": os.path.abspath(args.profile)} if args.profile else {"quantiser": args.quantiser}
            flags = hicache_args(store.url, codec=args.codec, **settings)
            first = _run(console, "first SGLang: computes and stores", model, flags, prompt, _prompt(1, len(prompt)))
            second = _run(console, "fresh SGLang: takes from the store", model, flags, prompt, _prompt(2, len(prompt)))
        _report(console, len(prompt), first, second, args)
    from_storage = second.answer.cached_tokens_details.get("storage", 0)
    equal = first.answer.output_ids == second.answer.output_ids
    if from_storage < 0.9 * len(prompt) or (args.quantiser == "exact" and not equal):
        console.print("[bold red]This is not what should have happened.[/]")
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a transformers model's directory; a small random one is made if not given")
    parser.add_argument("--prompt-tokens", type=int, default=1600, help="length of the prompt (default: %(default)s)")
    parser.add_argument("--text", help="a file whose first tokens are the prompt; random tokens if not given")
    parser.add_argument("--store", help="an empty or missing directory, kept, to look at with `kvfetch inspect`")
    parser.add_argument("--quantiser", choices=["exact", "uint8", "cachegen"], help="(default: exact)")
    parser.add_argument("--profile", help="what `kvfetch calibrate` made for the model: uses the quantiser klt")
    parser.add_argument("--codec", default="hevc", choices=["hevc", "hevc420", "zstd", "deflate"])
    args = parser.parse_args(argv)
    if not 2 * PAGE_SIZE <= args.prompt_tokens <= 2000:
        parser.error(f"--prompt-tokens is {args.prompt_tokens}; allowed are {2 * PAGE_SIZE} to 2000")
    if args.profile and (args.quantiser or not args.model):
        parser.error("--profile needs --model, and goes without --quantiser: it means klt")
    if args.profile and not Path(args.profile).is_file():
        parser.error(f"--profile {args.profile} is not a file; `kvfetch calibrate` makes one")
    args.quantiser = "klt" if args.profile else args.quantiser or "exact"
    if args.store and Path(args.store).exists() and any(Path(args.store).iterdir()):
        parser.error(f"--store {args.store} is not empty")
    return args


def _text_prompt(args: argparse.Namespace, model: Path) -> list[int]:
    from transformers import AutoTokenizer

    ids: list[int] = AutoTokenizer.from_pretrained(model)(Path(args.text).read_text())["input_ids"]
    if len(ids) < args.prompt_tokens:
        raise SystemExit(f"{args.text} has {len(ids)} tokens; --prompt-tokens is {args.prompt_tokens}")
    return ids[: args.prompt_tokens]


def _prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids that any model has."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(num_tokens)]


def _run(console: Console, title: str, model: Path, flags: list[str], prompt: list[int], warm_up: list[int]) -> Run:
    """Start a server, send the prompt, wait until all is written, stop the server.

    ``warm_up`` is another prompt of the same length, sent first: the two runs are to differ in the cache alone.
    """
    with console.status(title):
        started_s = time.monotonic()
        with SGLangServer(model, extra_args=flags) as server:
            start_s = time.monotonic() - started_s
            server.generate(input_ids=warm_up, max_new_tokens=1)
            wait_until_written(server, len(warm_up) // PAGE_SIZE)
            before = server.metrics()
            answer = server.generate(input_ids=prompt, max_new_tokens=16)
            if answer.cached_tokens == 0:
                wait_until_written(server, (len(warm_up) + len(prompt)) // PAGE_SIZE)
            return Run(answer, start_s, before, server.metrics())


def _report(console: Console, num_tokens: int, first: Run, second: Run, args: argparse.Namespace) -> None:
    table = Table(title=f"{num_tokens} tokens, quantiser {args.quantiser}, codec {args.codec}")
    for column in ("", "first SGLang", "fresh SGLang"):
        table.add_column(column, justify="left" if not column else "right")
    runs = (first, second)
    for tier in ("device", "host", "storage"):
        counts = (str(run.answer.cached_tokens_details.get(tier, 0)) for run in runs)
        table.add_row(f"cached tokens from {tier}", *counts)
    table.add_row("time to first token", *(f"{run.answer.ttft_s * 1e3:.0f} ms" for run in runs))
    table.add_row("start of the server", *(f"{run.start_s:.1f} s" for run in runs))
    written = kvfetch_traffic(first.metrics_before, first.metrics_after, "write")
    read = kvfetch_traffic(second.metrics_before, second.metrics_after)
    for what, of_written, of_read in (
        ("raw KV", written.raw_bytes, read.raw_bytes),
        ("on the wire", written.wire_bytes, read.wire_bytes),
    ):
        table.add_row(what, f"{of_written / 1e6:.2f} MB written", f"{of_read / 1e6:.2f} MB read")
    console.print(table)
    for run, title in zip(runs, ("first", "fresh"), strict=True):
        console.print(f"answer of the {title} SGLang: {run.answer.output_ids}")
    equal = first.answer.output_ids == second.answer.output_ids
    console.print(f"the answers are {'equal' if equal else 'NOT equal'}")
    if not torch.accelerator.is_available():
        console.print("Times are those of a small model on a CPU: they say nothing of a GPU server.")


if __name__ == "__main__":
    sys.exit(main())
