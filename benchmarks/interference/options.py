"""The command line of ``python -m benchmarks.interference``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from sgl_kvfetch.codecs import CodecName

_DESCRIPTION = """\
Sends a stream of new short prompts, while long prompts that were stored before are fetched over a slow link. Runs these
modes in turn, several times: none (only the short prompts, without our plugin), idle (the same in device mode), device
(device mode), threads (device mode with the data plane on threads of SGLang's process), host (HiCache's host tier and
SGLang's own prefetch) and blocking (device mode with a scheduler that waits for each fetch, as the paper's baseline).
Every mode gets the same prompts at the same times, and empty caches.

--separate adds device_hevc: device mode, with the same prompts stored as video. Without a hardware decoder, decoding
takes CPU time from the model, so the difference from device separates the cost of decoding from that of scheduling.

  python -m benchmarks.interference --launch --json out.json --plot timeline.png
"""

MODES = ("none", "idle", "device", "threads", "host", "blocking")
NO_FETCHES = ("none", "idle")
HEVC_MODE = "device_hevc"


@dataclass(frozen=True)
class Options:
    model: str | None
    json_path: Path | None
    plot_path: Path | None
    modes: tuple[str, ...]
    rounds: int
    duration_s: float
    short_rate: float
    short_tokens: int
    new_tokens: int
    long_prompts: int
    long_tokens: int
    threshold: int
    link_gbps: float
    codec: str
    seed: int
    pinned: str


def parse_options(argv: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.interference",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--launch", action="store_true", required=True, help="start SGLang and store for each run")
    parser.add_argument("--model", help="a model's directory (default: a small random Llama)")
    parser.add_argument("--json", type=Path, metavar="FILE", dest="json_path", help="where to write the figures")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", dest="plot_path", help="draw a timeline of device mode's last run"
    )
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--separate", action="store_true", help=f"add {HEVC_MODE}")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--duration", type=float, default=20.0, help="seconds per run (default: %(default)s)")
    parser.add_argument("--short-rate", type=float, default=3.0, help="short prompts per second (default: %(default)s)")
    parser.add_argument("--short-tokens", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=16, help="for a short prompt (default: %(default)s)")
    parser.add_argument("--long-prompts", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--long-tokens", type=int, default=1536, help="(default: %(default)s)")
    parser.add_argument(
        "--threshold",
        type=int,
        default=256,
        help="shorter prompts are not looked up; the default is SGLang's. If it is below --short-tokens, every short "
        "prompt waits for a lookup over the link that the fetches use (default: %(default)s)",
    )
    parser.add_argument(
        "--link-gbps", type=float, default=0.01, help="the store's link; a fetch should take seconds (default: 0.01)"
    )
    parser.add_argument(
        "--codec",
        choices=get_args(CodecName),
        default="zstd",
        help=f"codec of stored prompts, except for {HEVC_MODE}; zstd decodes fastest (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--pinned",
        choices=("yes", "no", "both"),
        default="both",
        help="run the scheduler's main thread alone on one core and the rest on another (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    modes = tuple(dict.fromkeys(args.modes.split(",") + [HEVC_MODE] * args.separate))
    if unknown := set(modes) - {*MODES, HEVC_MODE}:
        parser.error(f"--modes: unknown are {', '.join(sorted(unknown))}; known are {', '.join((*MODES, HEVC_MODE))}")
    if "none" not in modes:
        parser.error("--modes: 'none' is required, since the others are compared with it")
    if args.plot_path is not None and "device" not in modes:
        parser.error("--plot needs the mode 'device', which --modes leaves out")
    if args.plot_path is not None and args.pinned == "yes":
        parser.error("--plot needs a run on all cores, which --pinned yes leaves out")
    if args.new_tokens < 2:
        parser.error("--new-tokens: expected at least 2, to measure the time per token")
    return Options(
        model=args.model,
        json_path=args.json_path,
        plot_path=args.plot_path,
        modes=modes,
        rounds=args.rounds,
        duration_s=args.duration,
        short_rate=args.short_rate,
        short_tokens=args.short_tokens,
        new_tokens=args.new_tokens,
        long_prompts=args.long_prompts,
        long_tokens=args.long_tokens,
        threshold=args.threshold,
        link_gbps=args.link_gbps,
        codec=args.codec,
        seed=args.seed,
        pinned=args.pinned,
    )
