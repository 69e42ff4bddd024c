"""The command line of ``python -m benchmarks.sharegpt``, parsed and checked before anything is started."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load import Arrivals
from sgl_kvfetch.config import parse_config
from sgl_kvfetch.errors import ConfigError

BACKENDS = ("none", "file", "kvfetch")
DEFAULT_CONCURRENCY = 2
API_KEY_ENV = "SGLANG_API_KEY"

_DESCRIPTION = """\
Sends multi-turn conversations to SGLang and measures how long its users wait.

  python -m benchmarks.sharegpt --dataset FILE --url http://HOST:PORT     a live server
  python -m benchmarks.sharegpt --dataset FILE --launch [-- SGLANG ARGS]  starts SGLang and a store, and compares
                                                                          no cache, SGLang's file backend and kvfetch
"""


@dataclass(frozen=True)
class Options:
    dataset: Path
    url: str | None
    model: str | None
    tokenizer: str | None
    backends: tuple[str, ...]
    kvfetch: dict[str, Any]
    store: str | None
    sglang_args: tuple[str, ...]
    num_conversations: int
    turns: int
    max_input_tokens: int
    max_new_tokens: int
    dataset_answers: bool
    arrivals: Arrivals
    timeout_s: float
    json_path: Path | None
    plot_path: Path | None
    api_key: str | None

    @property
    def fill_arrivals(self) -> Arrivals:
        """Return the arrivals for filling the store, without pauses."""
        return Arrivals(concurrency=self.arrivals.concurrency or DEFAULT_CONCURRENCY)

    def as_json(self) -> dict[str, Any]:
        """Return the options as JSON, without secrets."""
        shown = {key: value for key, value in vars(self).items() if key not in ("api_key", "arrivals")}
        shown |= vars(self.arrivals)
        hidden = {"token": "(hidden)"} if "token" in self.kvfetch else {}
        shown |= {"kvfetch": self.kvfetch | hidden}
        return {key: str(value) if isinstance(value, Path) else value for key, value in shown.items()}


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line. On an error, exit with a message that says what is wrong and what is allowed."""
    own, sglang_args = _split(argv)
    parser = _parser()
    args = parser.parse_args(own)
    if not args.launch:
        for name in ("model", "store", "kvfetch", "backends"):
            if getattr(args, name):
                parser.error(f"--{name} needs --launch: it tells how to start SGLang, but {args.url} runs already")
        if sglang_args:
            parser.error(f"arguments for SGLang ({' '.join(sglang_args)}) need --launch")
    backends = _backends(parser, args.backends or ",".join(BACKENDS)) if args.launch else ()
    if "kvfetch" not in backends and (args.store or args.kvfetch):
        parser.error("--store and --kvfetch need the backend kvfetch, which --backends leaves out")
    concurrency = args.concurrency or (None if args.request_rate else DEFAULT_CONCURRENCY)
    return Options(
        dataset=args.dataset,
        url=None if args.launch else args.url,
        model=args.model,
        tokenizer=args.tokenizer,
        backends=backends,
        kvfetch=_kvfetch(parser, args.kvfetch or [], args.store),
        store=args.store,
        sglang_args=sglang_args,
        num_conversations=args.num_conversations,
        turns=args.turns,
        max_input_tokens=args.max_input_tokens,
        max_new_tokens=args.max_new_tokens,
        dataset_answers=args.answers == "dataset",
        arrivals=Arrivals(concurrency, args.request_rate, args.seed),
        timeout_s=args.timeout,
        json_path=args.json,
        plot_path=args.plot or (args.json.with_suffix(".png") if args.json else None),
        api_key=args.api_key or os.environ.get(API_KEY_ENV),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharegpt",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("conversations")
    data.add_argument(
        "--dataset",
        type=Path,
        required=True,
        help=".json: ShareGPT; .jsonl: lines with 'prompt' (or ShareGPT's 'conversations'); any other: text",
    )
    data.add_argument("--num-conversations", type=_count, default=8, metavar="N", help="default: %(default)s")
    data.add_argument("--turns", type=_count, default=3, metavar="N", help="at most, for each (default: %(default)s)")
    data.add_argument(
        "--max-input-tokens",
        type=_count,
        default=1500,
        metavar="N",
        help="longest prompt; the server's limit applies as well (default: %(default)s)",
    )
    data.add_argument("--max-new-tokens", type=_count, default=16, metavar="N", help="default: %(default)s")
    data.add_argument(
        "--answers",
        choices=["model", "dataset"],
        default="model",
        help="which answers later prompts repeat; a text has none (default: %(default)s)",
    )
    load = parser.add_argument_group("load")
    rate = load.add_mutually_exclusive_group()
    rate.add_argument(
        "--request-rate",
        type=_positive,
        metavar="R",
        help="requests per second: conversations start as a Poisson process of that rate over the number of turns",
    )
    rate.add_argument(
        "--concurrency", type=_count, metavar="N", help=f"conversations at a time (default: {DEFAULT_CONCURRENCY})"
    )
    load.add_argument("--seed", type=int, default=0, help="for the arrivals (default: %(default)s)")
    load.add_argument("--timeout", type=_positive, default=120.0, metavar="S", help="per request; default: %(default)s")
    live = parser.add_argument_group("a live server")
    live.add_argument("--url", default="http://127.0.0.1:30000", help="default: %(default)s")
    live.add_argument("--api-key", help=f"if the server needs one (default: {API_KEY_ENV} in the environment)")
    live.add_argument("--tokenizer", help="directory or name (default: the server's own)")
    launch = parser.add_argument_group("--launch")
    launch.add_argument("--launch", action="store_true", help="start SGLang and the store, and stop them at the end")
    launch.add_argument("--model", help="directory or name (default: a small random Llama)")
    launch.add_argument("--backends", metavar="LIST", help=f"default: {','.join(BACKENDS)}")
    launch.add_argument(
        "--kvfetch", action="append", metavar="KEY=VALUE", help="a key of kvfetch's config; may be repeated"
    )
    launch.add_argument("--store", metavar="URL", help="default: an empty store, started for the run")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=_output, metavar="FILE", help="where to write all figures")
    out.add_argument("--plot", type=_output, metavar="FILE", help="where to write the PNG (default: beside --json)")
    return parser


def _split(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Split the arguments into ours, and SGLang's after ``--``."""
    own = list(argv)
    if "--" not in own:
        return own, ()
    cut = own.index("--")
    return own[:cut], tuple(own[cut + 1 :])


def _backends(parser: argparse.ArgumentParser, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(","))
    unknown = [name for name in names if name not in BACKENDS]
    if unknown or len(set(names)) < len(names):
        parser.error(f"--backends is {value!r}; allowed are {', '.join(BACKENDS)}, each once, separated by commas")
    return names


def _kvfetch(parser: argparse.ArgumentParser, entries: Sequence[str], store: str | None) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for entry in entries:
        key, separator, value = entry.partition("=")
        if not separator or not key:
            parser.error(f"--kvfetch {entry!r}: expected KEY=VALUE, such as quantiser=uint8")
        if key == "store":
            parser.error(f"--kvfetch {entry!r}: use --store to name the store")
        try:
            config[key] = json.loads(value)
        except json.JSONDecodeError:
            config[key] = value
    try:
        parse_config({"store": store or "http://127.0.0.1:1", **config})
    except ConfigError as e:
        parser.error(str(e))
    return config


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _output(text: str) -> Path:
    """Return the path of a file that can be written. This fails before the run, rather than after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing directory")
    return path
