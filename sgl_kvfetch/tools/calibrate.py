"""``kvfetch calibrate``: measure a model once, for the quantiser ``klt``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from sgl_kvfetch.codec import (
    Calibration,
    CalibrationOptions,
    KltQuantiser,
    KVModel,
    Profile,
    Rope,
    calibrate_model,
    calibration_windows,
    find_rope,
    fingerprint_model,
    part_of,
)
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.prompts import read_texts
from sgl_kvfetch.tools.options import make_console
from sgl_kvfetch.tools.tables import make_table

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # in float16 the gradients would be lost
_LINE_EVERY_S = 10.0  # between progress lines when stderr is not a terminal


def calibrate(
    model: Annotated[str, typer.Option(metavar="PATH", help="Path of a model that transformers can load.")],
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Text like the model's traffic: plain, or JSONL with a field 'prompt'. The option can be repeated.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the profile.")],
    windows: Annotated[int, typer.Option(min=2, help="Windows of text; a fifth are held out for measuring.")] = 25,
    context: Annotated[
        int,
        typer.Option(
            min=16, help="Tokens of a window whose KV cache is quantised; KL measures the cost of these errors."
        ),
    ] = 1024,
    continuation: Annotated[int, typer.Option(min=16, help="Tokens after the context, predicted from its KV.")] = 512,
    part: Annotated[
        str, typer.Option(metavar="FROM:TO", help="Use this part of the text, in fractions of its tokens.")
    ] = "0:1",
    max_channels: Annotated[
        int,
        typer.Option(
            min=1,
            help="Channels that are transformed together: K and V of some heads and layers. More channels need fewer "
            "bits, but more time and memory to restore.",
        ),
    ] = 1536,
    tp_size: Annotated[
        int, typer.Option(min=1, help="The --tp-size that SGLang will run with, or a multiple of it.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N.", show_default="cuda if there is one")] = "",
    dtype: Annotated[
        str,
        typer.Option(help="The model's compute type: float32, or bfloat16, where rounding hides small divergences."),
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Seed for the tokens that are sampled to weigh errors.")] = 0,
) -> None:
    """Measure how a model's keys and values vary and how much errors in them matter.

    Writes the profile that klt needs. Give it to SGLang in --hicache-storage-backend-extra-config:
    {"profile": FILE, ...}. The printed table shows how many bits each target_kl needs; the text below it names the
    default target_kl.

    Example:

        kvfetch calibrate --model meta-llama/Llama-3.1-8B --text prompts.jsonl --out llama.profile --tp-size 2
    """
    if dtype not in _DTYPES:
        raise ConfigError(f"--dtype {dtype}: allowed are {', '.join(_DTYPES)}")
    if (out.exists() and not out.is_file()) or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: expected a file in an existing directory")
    prompts = [prompt for file in text for prompt in read_texts(file)]
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded = KVModel(model, device=device, dtype=_DTYPES[dtype])
    if loaded.num_heads % tp_size and tp_size % loaded.num_heads:
        raise ConfigError(f"--tp-size {tp_size}: cannot divide {loaded.num_heads} KV heads evenly among the ranks")
    window_tokens = context + continuation
    most = getattr(loaded.config, "max_position_embeddings", None)
    if most is not None and window_tokens > most:
        raise ConfigError(f"--context and --continuation are {window_tokens} tokens, the model has {most} positions")
    rope, notes = _rope_or_why_not(loaded)
    tokens = [part_of(loaded.tokenise(prompt), part) for prompt in prompts]
    ids = calibration_windows(loaded, tokens, windows, window_tokens)
    describe = Calibration(
        model=os.path.basename(os.path.normpath(model)),
        weights=fingerprint_model(model),
        text=", ".join(file.name for file in text),
        num_windows=windows,
        context_tokens=context,
        continuation_tokens=continuation,
        notes=notes,
        part=part,
    )
    options = CalibrationOptions(num_context=context, max_channels=max_channels, tp_size=tp_size, seed=seed)
    profile = calibrate_model(loaded, ids, rope, describe, options, _progress)
    profile.save(out)
    _report(profile, out)


def _rope_or_why_not(model: KVModel) -> tuple[Rope | None, tuple[str, ...]]:
    try:
        return find_rope(model), ()
    except UnsupportedError as e:
        note = f"K stays rotated, which costs bits: {e}"
        make_console(stderr=True).print(f"kvfetch: {note}")
        return None, (note,)


def _progress(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
    """Pass on ``steps``, and show a progress bar on a terminal, or else print a line every ten seconds."""
    console = make_console(stderr=True)
    if console.is_terminal:
        from rich.progress import track

        yield from track(steps, what, total, console=console, transient=True)
        return
    started_s = said_s = time.monotonic()
    for done, step in enumerate(steps, 1):
        yield step
        now_s = time.monotonic()
        if done == total or now_s - said_s >= _LINE_EVERY_S:
            left_s = (now_s - started_s) / done * (total - done)
            console.print(f"{what}: {done} of {total}, {left_s:.0f} s left")
            said_s = now_s


def _report(profile: Profile, out: Path) -> None:
    table = make_table((), ("target_kl", "step", "bits a value", "bf16 is larger by", "coefficients kept", "wide"))
    for point in profile.curve:
        ratio = f"{16 / point.bits_per_value:.1f}x" if point.bits_per_value else ""
        kept, wide = KltQuantiser(profile, step=point.step).coefficient_shares
        table.add_row(
            f"{point.kl:.2g}",
            f"{point.step:.3g}",
            f"{point.bits_per_value:.2f}",
            ratio,
            f"{kept:.0%}",
            f"{wide:.1%}",
        )
    console = make_console()
    console.print(table)
    grid, held_out = profile.grid, max(1, profile.calibration.num_windows // 5)
    console.print(
        f"Measured on {held_out} held-out windows of {profile.calibration.text}; bits are order-0 entropies.\n"
        f"Losing the context costs {profile.context_kl:.2g} nats a token, so the default target_kl is "
        f"{profile.default_target_kl:.2g}. The first {profile.num_sinks} tokens are kept exact.\n"
        f"Cells: {grid.cell_layers} layers, {grid.cell_heads} of {grid.num_heads} heads, K and V together.\n"
        f"{out}: profile {profile.digest}, {out.stat().st_size / 1e6:.1f} MB"
    )
