"""The command line of ``python -m benchmarks.codec``, parsed and checked before a model is loaded."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.codec.segments import PAGE_TOKENS

_DESCRIPTION = """\
Encodes a context's KV cache with many methods, continues from the restored KV, and compares bits and accuracy.

  python -m benchmarks.codec --model PATH --text FILE --json OUT
"""


@dataclass(frozen=True)
class Options:
    """``model`` and ``text`` may be None only with ``list_methods``."""

    model: str | None
    text: Path | None
    part: str
    windows: int
    context_tokens: int
    continuation_tokens: int
    methods: tuple[str, ...]
    profile: Path | None
    calibrate_text: Path | None
    calibrate_part: str
    calibrate_windows: int
    device: str
    json_path: Path | None
    plot_path: Path | None
    list_methods: bool

    def as_json(self) -> dict[str, Any]:
        return {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line. On an error, exit with a message that says what is wrong and what is allowed."""
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.list:
        for name in ("model", "text"):
            if getattr(args, name) is None:
                parser.error(f"--{name} is required")
    if args.context % PAGE_TOKENS:
        parser.error(f"--context is {args.context}; expected a multiple of {PAGE_TOKENS}, the page size")
    return Options(
        model=args.model,
        text=args.text,
        part=args.part,
        windows=args.windows,
        context_tokens=args.context,
        continuation_tokens=args.continuation,
        methods=tuple(pattern.strip() for pattern in args.methods.split(",") if pattern.strip()),
        profile=args.profile,
        calibrate_text=args.calibrate_text,
        calibrate_part=args.calibrate_part,
        calibrate_windows=args.calibrate_windows,
        device=args.device,
        json_path=args.json,
        plot_path=args.plot or (args.json.with_suffix(".png") if args.json else None),
        list_methods=args.list,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    data = parser.add_argument_group("what to encode")
    data.add_argument("--model", metavar="PATH", help="a model for transformers, which runs in float32")
    data.add_argument("--text", type=Path, metavar="FILE", help=".jsonl: lines with 'prompt'; any other: plain text")
    data.add_argument(
        "--part",
        default="0:1",
        metavar="FROM:TO",
        help="the part of each text to use, in fractions; avoid the part used for calibration (default: all)",
    )
    data.add_argument("--windows", type=_count, default=10, metavar="N", help="default: %(default)s")
    data.add_argument(
        "--context",
        type=_count,
        default=1024,
        metavar="TOKENS",
        help=f"length of the encoded context, a multiple of {PAGE_TOKENS} (default: %(default)s)",
    )
    data.add_argument(
        "--continuation",
        type=_count,
        default=512,
        metavar="TOKENS",
        help="following tokens, for which distributions are compared (default: %(default)s)",
    )
    data.add_argument("--device", default="auto", help="for the model: cpu, cuda, ... (default: %(default)s)")
    how = parser.add_argument_group("how to encode it")
    how.add_argument(
        "--methods", default="", metavar="LIST", help="names or patterns such as 'cachegen*,exact/*' (default: all)"
    )
    how.add_argument("--profile", type=Path, metavar="FILE", help="the model's, by kvfetch calibrate; klt needs it")
    how.add_argument("--list", action="store_true", help="list the methods and their sources, and exit")
    calibration = parser.add_argument_group("the text for KVTC's calibration, in windows of context and continuation")
    calibration.add_argument("--calibrate-text", type=Path, metavar="FILE", help="as --text; KVTC needs it")
    calibration.add_argument("--calibrate-part", default="0.5:1", metavar="FROM:TO", help="default: %(default)s")
    calibration.add_argument("--calibrate-windows", type=_count, default=25, metavar="N", help="default: %(default)s")
    out = parser.add_argument_group("output")
    out.add_argument("--json", type=_output, metavar="FILE", help="where to write all figures")
    out.add_argument("--plot", type=_output, metavar="FILE", help="where to write the PNG (default: beside --json)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _output(text: str) -> Path:
    """Return the path of a file that can be written. This fails before the run, rather than after it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in an existing directory")
    return path
