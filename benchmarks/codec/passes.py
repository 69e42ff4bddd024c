"""Measures what KV cache codecs cost in right answers: coding tasks solved at the first try, and passkeys found.

    python -m benchmarks.codec.passes --model PATH --text FILE --profile FILE [--methods LIST] [--json OUT]

The KV cache of a task's prompt goes through each method, all but its last 16 to 79 tokens. The prompt has a library of
made-up rules, and the function to complete. The answer runs in a sandbox, and passes its tests or fails (pass@1).
Passkeys are those of `benchmarks.codec.answers`. The first row is the exact KV cache. Intervals are Wilson's, of 95%.
*Lost* and *won* compare task by task: passed with the exact KV cache and not with the method's, and the reverse.

The model runs in bfloat16, as servers run it. Methods that need a calibration get it from the second half of the text,
so passkeys are of the first. With ``--minutes``, tasks and passkeys that have not begun by then are
left out, and the table counts what was done.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.codec.answers import finds, greedy_answers, make_passkeys, require_pages, share_interval
from benchmarks.codec.coding_tasks import LIBRARY, TASKS, Task
from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE, Method
from benchmarks.codec.methods import all_methods, fit, select
from benchmarks.codec.sandbox import passes
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, positive, run_and_report, settings, whole_numbers
from benchmarks.stats import estimate
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts

METHODS = "uint8/zstd,cachegen/zstd,klt/ans,klt-0.003/ans,klt-0.01/ans"
EXACT = "exact"
_CALIBRATION = ("0.5:1", 3, 1280)  # of methods that need one: the part of the text, and windows of so many tokens
_TAIL = 16  # at least so many last tokens of a prompt are computed
_WIDTH = 130
_BLOCK = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)
_ASK = """\
This is a module:

```python
{library}```

Write this function, which will be added to the module. Answer with one block of Python and nothing else.

```python
{start}```"""


@dataclass
class Scores:
    """One method's results. ``passkeys`` are by tokens of context."""

    bits: list[float] = field(default_factory=list)
    solved: list[bool] = field(default_factory=list)
    passkeys: dict[int, list[bool]] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    return run_and_report(_run, _parse(argv), _WIDTH)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.codec.passes", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--text", type=Path, required=True, help="plain text around the passkeys")
    parser.add_argument("--part", default="0:0.5", help="the part of the text to use")
    parser.add_argument("--profile", type=Path, help="the model's profile by kvfetch calibrate; klt needs it")
    parser.add_argument("--methods", default=METHODS, help="names or patterns")
    parser.add_argument("--tasks", type=int, default=len(TASKS), help="how many, spread over all of them")
    parser.add_argument("--new-tokens", type=int, default=160, help="the most tokens of an answer")
    parser.add_argument("--passkeys", type=int, default=10, help="how many of each length")
    parser.add_argument("--passkey-tokens", type=whole_numbers, default="1024,4096,16384", help="their lengths")
    parser.add_argument("--minutes", type=positive, default=600.0, help="begin nothing after this time")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    args.methods = tuple(args.methods.split(","))
    if not 0 <= args.tasks <= len(TASKS):
        parser.error(f"--tasks {args.tasks}; expected at most {len(TASKS)}")
    require_pages(parser, args.passkey_tokens)
    return args


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    _require_sandbox()
    end_s = time.monotonic() + 60 * args.minutes
    model = KVModel(args.model, dtype=torch.bfloat16)
    texts = read_texts(args.text)
    profile = load_profile(args.profile) if args.profile else None
    methods = select(all_methods(profile, can_calibrate=True), args.methods)
    fit(methods, model, args.text, *_CALIBRATION)
    scores = {name: Scores() for name in (EXACT, *(method.name for method in methods))}
    for task in (TASKS[i * len(TASKS) // args.tasks] for i in range(args.tasks)):
        if time.monotonic() > end_s:
            break
        _score_task(model, methods, task, args.new_tokens, scores)
        console.print(f"{task.start.splitlines()[0]} {[s.solved[-1] for s in scores.values()]}", markup=False)
    # One of each length at a time, so that a run that is out of time has some of each.
    keys = {n: make_passkeys(model, texts, args.part, args.passkeys, n) for n in args.passkey_tokens}
    for number in range(args.passkeys):
        for n, several in keys.items():
            if time.monotonic() > end_s:
                break
            for name, k, v in _restored(model, methods, several[number].context, scores):
                scores[name].passkeys.setdefault(n, []).append(finds(model, k, v, several[number]))
            console.print(f"passkey, {n} tokens: {[s.passkeys[n][-1] for s in scores.values()]}", markup=False)
    rows = [_row(name, s, scores[EXACT]) for name, s in scores.items()]
    console.print(_table(rows))
    return {
        "benchmark": "passes",
        "config": settings(args),
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _require_sandbox() -> None:
    try:
        works = passes("", "")
    except OSError as e:
        raise ConfigError(f"answers cannot be run in a sandbox: {e}; be root, or allow user namespaces") from e
    assert works, "an empty answer to an empty test passes"


def _restored(
    model: KVModel, methods: Sequence[Method], context: torch.Tensor, scores: dict[str, Scores]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name and the KV cache of ``context``, ``(tokens, layers, heads, dim)``, exact and by each method."""
    k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(context))
    yield EXACT, k, v
    for method in methods:
        coded = method.code(k, v)
        scores[method.name].bits.append(coded.bits_per_value)
        yield method.name, coded.k, coded.v


def _score_task(
    model: KVModel, methods: Sequence[Method], task: Task, new_tokens: int, scores: dict[str, Scores]
) -> None:
    ids = prompt_of(model, task)
    cut = (len(ids) - _TAIL) // PAGE_TOKENS * PAGE_TOKENS
    caches = {name: (k, v) for name, k, v in _restored(model, methods, ids[:cut], scores)}

    def text_of(answer: list[int]) -> str:
        text: str = model.tokenizer.decode(answer, skip_special_tokens=False)
        return text

    def have_ended(answers: list[list[int]]) -> bool:
        return all(model.tokenizer.eos_token_id in a or text_of(a).count("```") > 1 for a in answers)

    answers = greedy_answers(model, list(caches.values()), ids[cut:], new_tokens, have_ended)
    for name, answer in zip(caches, answers, strict=True):
        code = code_in(text_of(answer))
        scores[name].solved.append(passes(f"{LIBRARY}\n{code}", task.tests))


def prompt_of(model: KVModel, task: Task) -> torch.Tensor:
    """Return a task as tokens, in the model's chat template if it has one."""
    asked = _ASK.format(library=LIBRARY, start=task.start)
    if model.tokenizer.chat_template:
        message = [{"role": "user", "content": asked}]
        asked = model.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return torch.cat((model.start, model.tokenise(asked)))


def code_in(answer: str) -> str:
    """Return the first block of code of an answer, or all of it."""
    found = _BLOCK.search(answer)
    return found.group(1) if found else answer


def _row(name: str, scores: Scores, exact: Scores) -> dict[str, Any]:
    pairs = list(zip(exact.solved, scores.solved, strict=True))
    return {
        "name": name,
        "bits_per_value": estimate(scores.bits).mean if scores.bits else 16.0,
        "tasks": len(scores.solved),
        "solved": sum(scores.solved),
        "solved_ci": share_interval(sum(scores.solved), len(scores.solved)) if scores.solved else None,
        "lost": sum(was and not now for was, now in pairs),
        "won": sum(now and not was for was, now in pairs),
        "passkeys": {n: sum(found) for n, found in scores.passkeys.items()},
        "passkeys_of": {n: len(found) for n, found in scores.passkeys.items()},
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    lengths = rows[0]["passkeys"]
    columns = ("method", "bits a value", "tasks solved", "lost", "won", *(f"passkeys, {n:,}" for n in lengths))
    return make_table("Right answers; [] are 95% confidence intervals", columns, map(_cells, rows))


def _cells(row: dict[str, Any]) -> list[str]:
    solved = _share(row["solved"], row["tasks"]) if row["tasks"] else ""
    found = (_share(right, row["passkeys_of"][n]) for n, right in row["passkeys"].items())
    return [row["name"], f"{row['bits_per_value']:.2f}", solved, str(row["lost"]), str(row["won"]), *found]


def _share(successes: int, count: int) -> str:
    low, high = share_interval(successes, count)
    return f"{successes}/{count} [{low:.0%}, {high:.0%}]"


if __name__ == "__main__":
    sys.exit(main())
