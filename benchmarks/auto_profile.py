"""Measures what ``"quantiser": "auto"`` gives and costs on a real model: its profile beside one that somebody made with
``kvfetch calibrate``, and the engine's throughput while it calibrates.

    python -m benchmarks.auto_profile [--json OUT]

The text is Python's language reference. Of its second half, prompts of several lengths, in random order or with
``--in-order`` as the text has them, go through the sample that a server takes, and to the process that calibrates
beside it. The other profile is from windows of the same half. Both are measured on windows of the first half: bits at
equal divergence, by interpolation between steps.

Meanwhile SGLang computes prompts of 1,024 tokens, one after the other, in blocks: with the process stopped, with the
process running at its priority, and with the process stopped during each request, as an engine on the CPU has it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.prose import prose
from benchmarks.real_model import real_model
from benchmarks.real_profile import CALIBRATION_PART, PROMPTS_PART
from benchmarks.report import make_parser, no_traceback, output_file, whole_number
from harness.engine import SGLangServer, hicache_args
from sgl_kvfetch.codec.calibrate.curve import HeldOut, measure_contexts
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.codec.calibrate.text import calibration_windows, part_of, tokenise
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.profile import Profile, load_profile
from sgl_kvfetch.plane.calibration.own import OwnCalibration
from sgl_kvfetch.plane.messages import Watch
from sgl_kvfetch.plugin.prompt_sample import PromptSample
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS

TARGETS = 1e-3, 3e-3, 1e-2
STATES = "stopped", "runs", "stopped during requests"
_LENGTHS = 200, 1536  # of prompts


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.auto_profile", __doc__)
    parser.add_argument("--model", type=Path, help="a model's directory; else the real model")
    parser.add_argument("--windows", type=whole_number, default=25, help="of each profile")
    parser.add_argument("--held-out", type=whole_number, default=3, help="windows that both are measured on")
    parser.add_argument("--requests", type=whole_number, default=6, help="in a block")
    parser.add_argument("--rounds", type=whole_number, default=4, help="of a block in each state")
    parser.add_argument("--in-order", action="store_true", help="the first prompts are the beginning of the text")
    parser.add_argument("--json", type=output_file)
    args = parser.parse_args(argv)
    with no_traceback(), tempfile.TemporaryDirectory(prefix="auto-") as folder:
        found = asyncio.run(measure(args, args.model or real_model(), Path(folder)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2))
    return 0


async def measure(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    loaded = LayeredModel(str(model))
    text = tokenise(loaded.tokenizer, prose())
    sample = PromptSample(args.windows)
    prompts = list(prompts_of(part_of(text, CALIBRATION_PART).tolist()))
    if not args.in_order:
        random.Random(1).shuffle(prompts)
    for number, prompt in enumerate(prompts):
        sample.add(str(number), prompt, 0, len(prompt))
    if not sample.is_full:
        raise SystemExit(f"the text has too few prompts for {args.windows} windows")
    ended = asyncio.Event()
    watch = Watch(fingerprint_model(str(model)), str(model), model.name, 1, finds=True)
    own = OwnCalibration(folder / "own", watch, 1, ended.set)
    own.show(sample.take_windows())
    own.pause(is_paused=True)
    await own.begin()
    first_half = part_of(text, PROMPTS_PART)
    try:
        speeds = await speed(args, model, folder, own, first_half.tolist())
        started_s = time.monotonic()
        own.pause(is_paused=False)
        await ended.wait()
        print(f"calibrated, the last {time.monotonic() - started_s:.0f} s of it alone")
        if own.profile is None:
            raise SystemExit("the calibration failed")
        offline = await asyncio.to_thread(calibrate, args.windows, model, folder)
        profiles = {"auto": load_profile(own.profile), "kvfetch calibrate": load_profile(offline)}
    finally:
        await own.close()
    windows = calibration_windows(loaded.tokenizer, [first_half], args.held_out, CONTEXT_TOKENS + CONTINUATION_TOKENS)
    bits = {name: curve(loaded, profile, windows) for name, profile in profiles.items()}
    for target in TARGETS:
        auto, other = (bits[name][f"{target:g}"] for name in profiles)
        print(f"KL {target:g}: auto {auto:.3f} bits a value, kvfetch calibrate {other:.3f}: {auto / other:.3f}x")
    return {"seconds_a_block": speeds, "bits": bits, "targets": {n: p.default_target_kl for n, p in profiles.items()}}


def prompts_of(tokens: list[int]) -> Iterator[list[int]]:
    """Cut tokens into prompts of random lengths."""
    rng, first = random.Random(0), 0
    while first < len(tokens):
        length = rng.randint(*_LENGTHS)
        yield tokens[first : first + length]
        first += length


async def speed(
    args: argparse.Namespace, model: Path, folder: Path, own: OwnCalibration, tokens: list[int]
) -> dict[str, list[float]]:
    """Return how long each block of requests takes, in seconds, by what the calibration does meanwhile."""
    seconds: dict[str, list[float]] = {state: [] for state in STATES}
    rng = random.Random(0)

    def ask(server: SGLangServer) -> None:
        first = rng.randrange(len(tokens) - CONTEXT_TOKENS)
        salt = [rng.choice(tokens) for _ in range(16)]  # no prompt is in the cache
        server.generate(input_ids=salt + tokens[first : first + CONTEXT_TOKENS], max_new_tokens=16)

    with (
        yielding_to_other_sessions(),
        SGLangServer(model, extra_args=hicache_args((folder / "store").as_uri(), host_pool_gb=1)) as server,
    ):
        for _ in range(4):
            await asyncio.to_thread(ask, server)
        for number in range(args.rounds):
            for state in STATES if number % 2 else STATES[::-1]:
                started_s = time.monotonic()
                for _ in range(args.requests):
                    own.pause(is_paused=state != "runs")
                    await asyncio.to_thread(ask, server)
                    own.pause(is_paused=state == "stopped")
                seconds[state].append(time.monotonic() - started_s)
                own.pause(is_paused=True)
                if own.profile is not None:
                    raise SystemExit("the calibration ended before the blocks did: ask for fewer")
    base = sorted(seconds["stopped"])
    for state in STATES:
        ratios = sorted(x / y for x, y in zip(seconds[state], seconds["stopped"], strict=True))
        print(
            f"calibration {state}: {min(seconds[state]):.2f} s a block at best, {median(seconds[state]):.2f} s in the "
            f"median, {median(ratios):.3f}x of stopped (blocks: {base[0]:.2f} to {base[-1]:.2f} s)"
        )
    return seconds


@contextmanager
def yielding_to_other_sessions() -> Iterator[None]:
    """Run after the server, and let the calibration do so, as it would beside the server.

    A server and its calibration are in one session. Here they are in two, between which Linux divides the cores. The
    session is also that of the terminal, so it gets its priority back.
    """
    group = Path("/proc/self/autogroup")
    if not group.exists():
        yield
        return
    nice = group.read_text().split()[-1]
    group.write_text("19")
    try:
        yield
    finally:
        group.write_text(nice)


def calibrate(windows: int, model: Path, folder: Path) -> Path:
    text, out = folder / "python-reference.txt", folder / "offline.profile"
    text.write_text(prose())
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "calibrate", "--model", str(model), "--text", str(text)]
    command += ["--part", CALIBRATION_PART, "--windows", str(windows), "--out", str(out)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return out


def curve(model: LayeredModel, profile: Profile, windows: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return the bits a value at each of ``TARGETS`` on these windows."""
    contexts = [context_of(model, window[:CONTEXT_TOKENS]) for window in windows]
    measured = measure_contexts(model, profile, contexts, [window[CONTEXT_TOKENS:] for window in windows])
    return {f"{target:g}": bits_at(measured, target) for target in TARGETS}


def context_of(model: LayeredModel, window: torch.Tensor) -> HeldOut:
    """Return what a model keeps of a context, all of whose layers are coded."""
    hidden, calls, parts = model.embed(window), model.calls(len(window)), []
    for index in range(model.num_layers):
        with model.layer(index) as layer:
            hidden, kv = layer.forward(hidden, calls)
            assert isinstance(kv, KV)
            parts.append([x.bfloat16() for x in kv])
    return HeldOut(CellValues(*(torch.stack(x, 1) for x in zip(*parts, strict=True))), {})


def bits_at(profile: Profile, kl: float) -> float:
    for low, high in pairwise(profile.curve):
        if low.kl <= kl <= high.kl:
            part = math.log(kl / low.kl) / math.log(high.kl / low.kl)
            return low.bits_per_value + part * (high.bits_per_value - low.bits_per_value)
    return math.nan


if __name__ == "__main__":
    sys.exit(main())
