"""Measures how a quantiser changes SGLang's answers: greedy tokens and their log probabilities, against no cache.

    python -m benchmarks.accuracy --model PATH --text FILE [--profile FILE] [--configs klt:1e-4,uint8] [--json OUT]

For each configuration, this starts one SGLang server, which answers every prompt twice. First it computes the whole
prompt and writes the KV cache to a store. Then its own caches are flushed, and it continues from the store. The first
answers are those without a cache.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.server_facts import kvfetch_traffic
from benchmarks.tokens import num_alike
from harness.engine import Generation, SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.calibrate.model import cut_windows, part_of, prompt_start, read_text, tokenise
from sgl_kvfetch.errors import ConfigError

PAGE_SIZE = 16
_TABLE_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One configuration. Log probabilities are compared up to the first difference between the answers: after that
    they describe different texts."""

    config: str
    prompts: int
    from_storage: float  # share of the prompts' tokens
    equal_answers: int
    equal_first_tokens: int
    equal_tokens: float  # share of all tokens before the first difference
    logprob_change_mean: float  # nats, absolute
    logprob_change_max: float
    bits_per_value: float  # of the data read from the store


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    console.width = max(console.width, _TABLE_WIDTH)
    try:
        prompts = _prompts(args)
    except ConfigError as e:
        raise SystemExit(f"benchmarks.accuracy: {e}") from e
    rows = [_measure(console, args, config, prompts) for config in args.configs]
    console.print(_table(rows, args.new_tokens))
    if args.json:
        report = {
            "model": args.model,
            "text": args.text,
            "part": args.part,
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "machine": machine(),
            "versions": versions(),
            "rows": [asdict(row) for row in rows],
        }
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model's directory, for SGLang")
    parser.add_argument("--text", required=True, help="plain text, or JSONL with a field `prompt`")
    parser.add_argument(
        "--part", default="0:1", help="the part of each text to use, in fractions (default: %(default)s)"
    )
    parser.add_argument("--profile", help="a profile by `kvfetch calibrate`, for `klt`")
    parser.add_argument(
        "--configs",
        help="what to compare: exact, uint8, cachegen, klt (at its default) or klt:TARGET_KL "
        "(default: exact, uint8, cachegen, and klt if there is a profile)",
    )
    parser.add_argument("--prompts", type=int, default=50, help="(default: %(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=768, help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=32, help="(default: %(default)s)")
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args(argv)
    default = ["exact", "uint8", "cachegen", *(["klt"] if args.profile else [])]
    args.configs = args.configs.split(",") if args.configs else default
    for config in args.configs:
        name, _, target = config.partition(":")
        if name not in ("exact", "uint8", "cachegen", "klt") or (target and not (name == "klt" and _is_number(target))):
            parser.error(f"--configs: {config!r} is unknown; known are exact, uint8, cachegen, klt and klt:TARGET_KL")
        if name == "klt" and not args.profile:
            parser.error(f"--configs: {config!r} needs --profile")
    for name in ("prompts", "new_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected 1 or more")
    if args.prompt_tokens < 2 * PAGE_SIZE:
        parser.error(f"--prompt-tokens is {args.prompt_tokens}; expected {2 * PAGE_SIZE} or more")
    return args


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False


def _prompts(args: argparse.Namespace) -> list[list[int]]:
    """Return the prompts' token ids. Raises ConfigError."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [part_of(tokenise(tokenizer, text), args.part) for text in read_text(Path(args.text))]
    windows = cut_windows(texts, args.prompts, args.prompt_tokens, prompt_start(tokenizer))
    return [window.tolist() for window in windows]


def _settings(config: str, profile: str | None) -> dict[str, Any]:
    name, _, target = config.partition(":")
    if name != "klt":
        return {"quantiser": name}
    assert profile is not None
    return {"profile": str(Path(profile).absolute())} | ({"target_kl": float(target)} if target else {})


def _measure(console: Console, args: argparse.Namespace, config: str, prompts: Sequence[list[int]]) -> Row:
    with tempfile.TemporaryDirectory(prefix="kvfetch-accuracy-") as folder, StoreProcess(Path(folder)) as store:
        flags = hicache_args(store.url, codec="hevc", **_settings(config, args.profile))
        with SGLangServer(args.model, extra_args=flags) as server:
            computed = []
            for number, prompt in enumerate(track(prompts, f"{config}: computing", console=console, transient=True), 1):
                computed.append(_ask(server, prompt, args.new_tokens))
                # One prompt at a time, so that the write queue never drops any.
                wait_until_written(server, number * (len(prompt) // PAGE_SIZE))
            server.flush()
            before = server.metrics()
            restored = [
                _ask(server, prompt, args.new_tokens)
                for prompt in track(prompts, f"{config}: from the store", console=console, transient=True)
            ]
            traffic = kvfetch_traffic(before, server.metrics())
            value_bytes = _value_bytes(server)
    return _compare(config, computed, restored, prompts, traffic.wire_bytes * 8 / (traffic.raw_bytes / value_bytes))


def _value_bytes(server: SGLangServer) -> int:
    dtype = json.loads(server.request("GET", "/get_server_info"))["dtype"]
    return 4 if dtype == "float32" else 2


def _ask(server: SGLangServer, prompt: list[int], new_tokens: int) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=new_tokens, logprobs=True)


def _compare(
    config: str,
    computed: Sequence[Generation],
    restored: Sequence[Generation],
    prompts: Sequence[list[int]],
    bits_per_value: float,
) -> Row:
    cached = sum(int(a.cached_tokens_details.get("storage", 0)) for a in restored)
    if any(a.cached_tokens for a in computed):
        raise SystemExit("benchmarks.accuracy: a prompt was cached before it was computed; give different prompts")
    alike = [num_alike(a.output_ids, b.output_ids) for a, b in zip(computed, restored, strict=True)]
    changes = [
        abs(x - y)
        for a, b, n in zip(computed, restored, alike, strict=True)
        for x, y in zip(a.logprobs[:n], b.logprobs[:n], strict=True)
    ]
    num_new = len(computed[0].output_ids)
    return Row(
        config=config,
        prompts=len(prompts),
        from_storage=cached / sum(map(len, prompts)),
        equal_answers=sum(n == num_new for n in alike),
        equal_first_tokens=sum(n > 0 for n in alike),
        equal_tokens=sum(alike) / (num_new * len(prompts)),
        logprob_change_mean=sum(changes) / max(1, len(changes)),
        logprob_change_max=max(changes, default=0.0),
        bits_per_value=bits_per_value,
    )


def _table(rows: Sequence[Row], new_tokens: int) -> Table:
    table = Table(title=f"{rows[0].prompts} prompts, {new_tokens} greedy tokens each, against no cache")
    table.add_column("", no_wrap=True)
    for column in (
        "stored",
        "equal answers",
        "first tokens",
        "tokens alike",
        "|Δ logprob|",
        "max",
        "bits a value",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.config,
            f"{row.from_storage:.0%}",
            f"{row.equal_answers}/{row.prompts}",
            f"{row.equal_first_tokens}/{row.prompts}",
            f"{row.equal_tokens:.1%}",
            f"{row.logprob_change_mean:.4f}",
            f"{row.logprob_change_max:.3f}",
            f"{row.bits_per_value:.2f}",
        )
    return table


if __name__ == "__main__":
    sys.exit(main())
