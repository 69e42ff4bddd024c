"""Say what a store would do for your own traffic, before you install anything on servers, and draw it.

    python examples/traffic.py LOG.jsonl --model /models/llama --link 10Gbps --prefill-tps 8000 [--plot traffic.png]

A line of the log is a request, in the order in which they came: {"prompt": TEXT} or {"prompt": [1, 2, ...]}, the text
as it is after the chat template. --model is the model's folder: its tokenizer makes tokens of texts, and `kvfetch
estimate` reads its config. The times are those of `kvfetch estimate`: the engine computes, or fetches, the part of a
prompt that an earlier request began with, and computes the rest. Nothing is evicted, and no server remembers anything,
as if each request came to another one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.prompts import page_hashes, read_prompts, tokenise

PAGE_SIZE = 64
LOOKED_UP_FROM = 256  # tokens: SGLang's prefetch_threshold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--link", required=True)
    parser.add_argument("--prefill-tps", type=float, required=True)
    parser.add_argument("--coding", default="exact", choices=("raw", "exact", "uint8", "klt"))
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    options = ("--model", args.model, "--link", args.link, "--prefill-tps", str(args.prefill_tps), "--json")
    result = subprocess.run(["kvfetch", "estimate", *options], stdout=subprocess.PIPE)
    if result.returncode:
        raise SystemExit(result.returncode)  # it has said why
    estimated = json.loads(result.stdout)
    coding = estimated["codings"][args.coding]
    shared = shared_tokens(tokenise(args.model, read_prompts(args.log)))
    fetch_s = seconds_by_tokens(coding["ttft_s"])
    computed = [tokens / args.prefill_tps for tokens, _ in shared]
    fetched = [
        min(alone, fetch_s(stored) + (tokens - stored) / args.prefill_tps) if stored else alone
        for alone, (tokens, stored) in zip(computed, shared, strict=True)
    ]
    all_tokens, stored_tokens = (sum(column) for column in zip(*shared, strict=True))
    new_bytes = (all_tokens - stored_tokens) * coding["bytes_per_token"]
    print(f"{len(shared)} requests, {all_tokens:,} tokens: {stored_tokens / all_tokens:.0%} came from earlier requests")
    print(f"new in the store: {new_bytes / 1e9:.2f} GB with {args.coding}")
    print(f"mean time to first token: {mean(computed):.3g} s computed, {mean(fetched):.3g} s with a store")
    if args.plot:
        draw(args.plot, computed, fetched)


def shared_tokens(prompts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Return, for each prompt, its tokens and how many of them are a beginning that an earlier prompt had, too."""
    seen: set[bytes] = set()
    found = []
    for tokens in prompts:
        hashes = page_hashes(tokens, PAGE_SIZE)  # each depends on all pages before
        pages = next((number for number, each in enumerate(hashes) if each not in seen), len(hashes))
        found.append((len(tokens), pages * PAGE_SIZE if len(tokens) >= LOOKED_UP_FROM else 0))
        seen.update(hashes)
    return found


def seconds_by_tokens(ttft_s: dict[str, float]) -> Callable[[int], float]:
    """Return a function from a number of tokens to the seconds of their fetch, which grow evenly with it."""
    (short, first), *_, (long, last) = sorted((int(tokens), seconds) for tokens, seconds in ttft_s.items())
    each = (last - first) / (long - short)
    return lambda tokens: first + (tokens - short) * each


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def draw(path: Path, computed: Sequence[float], fetched: Sequence[float]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained", dpi=150)
    axes.ecdf(computed, label="computed", color="#E69F00", lw=2)
    axes.ecdf(fetched, label="with a store", color="#0072B2", lw=2)
    axes.set(xlabel="time to first token (s), estimated", ylabel="share of requests")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right")
    figure.savefig(path)


if __name__ == "__main__":
    try:
        main()
    except KVFetchError as e:
        raise SystemExit(f"traffic.py: {e}") from None
