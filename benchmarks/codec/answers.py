"""Measures how KV cache codecs change a model's answers, by continuing prompts from each codec's restored KV cache.

    python -m benchmarks.codec.answers --model PATH --text FILE [--profile FILE] [--methods LIST] [--json OUT]

Four figures per method, compared with the exact KV cache:

* equal answers: the number of greedy answers that are equal to the last token;
* tokens alike: the number of tokens that are equal before the first difference;
* change of NLL: that of the text that follows the prompt;
* passkeys: five digits stand somewhere in a long text, and are asked for at its end. All five must be right.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE, Method
from benchmarks.codec.methods import all_methods, fit, select
from benchmarks.codec.segments import PAGE_TOKENS
from benchmarks.codec.windows import windows_of
from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, run_and_report, settings, whole_numbers
from benchmarks.stats import estimate
from sgl_kvfetch.codec.calibrate.text import part_of
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import read_texts

_TAIL = 16  # last tokens of a prompt, which are always computed
_DIGITS = 5
_WIDTH = 150
METHODS = "exact/zstd,uint8/zstd,cachegen*/zstd,kvtc-8x,kvtc-16x,klt*/zstd"


@dataclass(frozen=True)
class Prompt:
    """Token ids. The KV of ``context`` is encoded. ``following`` is the text after it."""

    context: torch.Tensor
    following: torch.Tensor


@dataclass(frozen=True)
class Passkey:
    context: torch.Tensor
    question: torch.Tensor
    answer: torch.Tensor


@dataclass
class Scores:
    """One method's results, with one number per prompt."""

    bits: list[float] = field(default_factory=list)
    alike: list[int] = field(default_factory=list)  # leading tokens
    dnll: list[float] = field(default_factory=list)
    passkeys: dict[int, list[bool]] = field(default_factory=dict)  # by tokens of context


def main(argv: Sequence[str] | None = None) -> int:
    return run_and_report(_run, _parse(argv), _WIDTH)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.codec.answers", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--text", type=Path, required=True, help="plain text, or JSONL with `prompt`")
    parser.add_argument("--part", default="0:0.5", help="the part of the text to use")
    parser.add_argument("--profile", type=Path, help="the model's profile by kvfetch calibrate; klt needs it")
    parser.add_argument("--calibrate-text", type=Path, help="the text to fit KVTC to; KVTC needs it")
    parser.add_argument("--calibrate-part", default="0.5:1", help="the part of it to use")
    parser.add_argument("--calibrate-windows", type=int, default=25, help="how many")
    parser.add_argument("--methods", default=METHODS, help="names or patterns")
    parser.add_argument("--prompts", type=int, default=24, help="how many")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens of an answer")
    parser.add_argument("--passkeys", type=int, default=10, help="how many of each length")
    parser.add_argument("--passkey-tokens", type=whole_numbers, default="1024,2048,4096,6144", help="their lengths")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args(argv)
    args.methods = tuple(args.methods.split(","))
    require_pages(parser, (args.prompt_tokens, *args.passkey_tokens))
    return args


def require_pages(parser: argparse.ArgumentParser, contexts: Sequence[int]) -> None:
    """End the program unless each length, in tokens, is a whole number of pages, two or more."""
    for tokens in contexts:
        if tokens < 2 * PAGE_TOKENS or tokens % PAGE_TOKENS:
            parser.error(
                f"{tokens} tokens of context; expected a multiple of {PAGE_TOKENS}, at least {2 * PAGE_TOKENS}"
            )


def _run(args: argparse.Namespace, console: Console) -> dict[str, Any]:
    model = KVModel(args.model)
    texts = read_texts(args.text)
    prompts = _prompts(model, texts, args)
    passkeys = {n: make_passkeys(model, texts, args.part, args.passkeys, n) for n in args.passkey_tokens}
    profile = load_profile(args.profile) if args.profile else None
    methods = select(all_methods(profile, can_calibrate=args.calibrate_text is not None), args.methods)
    fit(methods, model, args.calibrate_text, args.calibrate_part, args.calibrate_windows, args.prompt_tokens)
    scores = {method.name: Scores(passkeys={n: [] for n in passkeys}) for method in methods}
    exact_right: dict[int, list[bool]] = {n: [] for n in passkeys}
    total = len(prompts) + sum(map(len, passkeys.values()))
    with tqdm(total=total, unit="prompt", disable=not sys.stderr.isatty()) as bar:
        for prompt in prompts:
            _score_prompt(model, methods, prompt, args.new_tokens, scores)
            bar.update()
        for n, several in passkeys.items():
            for passkey in several:
                exact_right[n].append(_score_passkey(model, methods, passkey, scores, n))
                bar.update()
    rows = [_row(name, s, args.new_tokens) for name, s in scores.items()]
    console.print(_table(rows, exact_right, args.new_tokens))
    return {
        "benchmark": "answers",
        "config": settings(args),
        "exact_passkeys": {n: sum(right) for n, right in exact_right.items()},
        "rows": rows,
        "machine": machine(),
        "versions": versions(),
    }


def _prompts(model: KVModel, texts: Sequence[str], args: argparse.Namespace) -> list[Prompt]:
    length = args.prompt_tokens + _TAIL + args.new_tokens
    windows = windows_of(model, texts, args.part, args.prompts, length)
    return [Prompt(w[: args.prompt_tokens], w[args.prompt_tokens :]) for w in windows]


def make_passkeys(model: KVModel, texts: Sequence[str], part: str, count: int, num_tokens: int) -> list[Passkey]:
    """Return contexts of ``num_tokens`` tokens with five digits somewhere inside. Each run gives the same ones."""
    rng = random.Random(num_tokens)
    tokens = torch.cat([part_of(model.tokenise(text), part) for text in texts])
    if len(tokens) < num_tokens:
        raise ConfigError(f"the text has {len(tokens)} tokens; a passkey's context needs {num_tokens}")
    made = []
    for _ in range(count):
        key = "".join(rng.choice("0123456789") for _ in range(_DIGITS))
        needle = model.tokenise(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
        first = rng.randrange(len(tokens) - num_tokens + 1)
        filler = tokens[first : first + num_tokens - len(needle) - len(model.start)]
        place = rng.randrange(len(filler))
        context = torch.cat((model.start, filler[:place], needle, filler[place:]))
        question = model.tokenise("\n\nWhat is the pass key? The pass key is")
        made.append(Passkey(context, question, model.tokenise(f" {key}")))
    return made


def _score_prompt(
    model: KVModel, methods: Sequence[Method], prompt: Prompt, new_tokens: int, scores: dict[str, Scores]
) -> None:
    k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(prompt.context))
    restored = [(k, v)]
    for method in methods:
        coded = method.code(k, v)
        scores[method.name].bits.append(coded.bits_per_value)
        restored.append((coded.k, coded.v))
    nlls = [_nll(model, *kv, prompt.following) for kv in restored]
    expected, *answers = greedy_answers(model, restored, prompt.following[:_TAIL], new_tokens)
    for method, nll, answer in zip(methods, nlls[1:], answers, strict=True):
        scores[method.name].dnll.append(nll - nlls[0])
        scores[method.name].alike.append(num_alike(expected, answer))


def _score_passkey(
    model: KVModel, methods: Sequence[Method], passkey: Passkey, scores: dict[str, Scores], num_tokens: int
) -> bool:
    """Score all methods. Return whether the model finds the passkey with the exact KV cache."""
    k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(passkey.context))
    for method in methods:
        coded = method.code(k, v)
        scores[method.name].passkeys[num_tokens].append(finds(model, coded.k, coded.v, passkey))
    return finds(model, k, v, passkey)


@torch.no_grad()
def finds(model: KVModel, k: torch.Tensor, v: torch.Tensor, passkey: Passkey) -> bool:
    """Return whether a greedy answer is right: whether each digit is the likeliest token after those before it."""
    asked = torch.cat((passkey.question, passkey.answer[:-1]))
    told = model.log_probabilities(k, v, asked)[len(passkey.question) - 1 :].argmax(-1)
    return bool((told.cpu() == passkey.answer).all())


@torch.no_grad()
def _nll(model: KVModel, k: torch.Tensor, v: torch.Tensor, following: torch.Tensor) -> float:
    log_p = model.log_probabilities(k, v, following[:-1])
    return float(-log_p.cpu().gather(1, following[1:, None]).double().mean())


@torch.no_grad()
def greedy_answers(
    model: KVModel,
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tail: torch.Tensor,
    new_tokens: int,
    have_ended: Callable[[list[list[int]]], bool] = lambda _: False,
) -> list[list[int]]:
    """Return the greedy answers after ``tail`` from each cache ``(tokens, layers, heads, dim)``, all in one batch.

    ``have_ended`` gets all answers so far after each token, and may end them early."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in range(model.num_layers):
        pair = (torch.stack([kv[i][:, layer].transpose(0, 1) for kv in caches]) for i in range(2))
        cache.update(*(x.to(model.device, model.model.dtype) for x in pair), layer)
    ids = tail.expand(len(caches), -1).to(model.device)
    answers: list[list[int]] = [[] for _ in caches]
    for _ in range(new_tokens):
        logits = model.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        ids = logits.argmax(-1, keepdim=True)
        for answer, token in zip(answers, ids[:, 0].tolist(), strict=True):
            answer.append(token)
        if have_ended(answers):
            break
    return answers


def num_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens are equal."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def share_interval(successes: int, count: int) -> tuple[float, float]:
    """Return the 95% confidence interval of a share (Wilson, "Probable inference", 1927)."""
    z = 1.96
    centre = (successes + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(successes * (count - successes) / count + z * z / 4)
    return max(0.0, centre - half), min(1.0, centre + half)


def _row(name: str, scores: Scores, new_tokens: int) -> dict[str, Any]:
    equal, count = sum(n == new_tokens for n in scores.alike), len(scores.alike)
    alike = estimate([float(n) for n in scores.alike])
    dnll = estimate(scores.dnll)
    return {
        "name": name,
        "bits_per_value": estimate(scores.bits).mean,
        "prompts": count,
        "equal_answers": equal,
        "equal_answers_ci": share_interval(equal, count),
        "tokens_alike": alike.mean,
        "tokens_alike_ci": alike.interval,
        "dnll": dnll.mean,
        "dnll_ci": dnll.interval,
        "passkeys": {n: sum(right) for n, right in scores.passkeys.items()},
        "passkeys_of": {n: len(right) for n, right in scores.passkeys.items()},
    }


def _table(rows: Sequence[dict[str, Any]], exact_right: dict[int, list[bool]], new_tokens: int) -> Table:
    columns = ("method", "bits a value", "equal answers", f"tokens alike of {new_tokens}", "change of NLL")
    itself = ["the model itself", "16", "", "", "", *(f"{sum(right)}/{len(right)}" for right in exact_right.values())]
    return make_table(
        "Against the exact KV cache; ± and [] are 95% confidence intervals",
        (*columns, *(f"passkeys, {n:,}" for n in exact_right)),
        [itself, *map(_cells, rows)],
    )


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row["equal_answers_ci"]
    return [
        row["name"],
        f"{row['bits_per_value']:.3f}",
        f"{row['equal_answers']}/{row['prompts']} [{low:.0%}, {high:.0%}]",
        f"{row['tokens_alike']:.1f} {_margin(row['tokens_alike_ci'], '.1f')}",
        f"{row['dnll']:+.4f} {_margin(row['dnll_ci'], '.4f')}",
        *(f"{right}/{row['passkeys_of'][n]}" for n, right in row["passkeys"].items()),
    ]


def _margin(interval: tuple[float, float] | None, form: str) -> str:
    return "" if interval is None else f"±{(interval[1] - interval[0]) / 2:{form}}"


if __name__ == "__main__":
    sys.exit(main())
