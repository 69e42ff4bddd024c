"""What ``kvfetch calibrate`` does, once its options are read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from sgl_kvfetch.calibrate.fit import Options, calibrate
from sgl_kvfetch.calibrate.model import KVModel, calibration_windows, part_of, read_text
from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.tables import make_table
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.fingerprint import fingerprint_model
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import Calibration, Profile
from sgl_kvfetch.quant.rope import Rope, rope_of_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # in float16 the gradients would be lost
_LINE_EVERY_S = 10.0  # of progress, where the output is no terminal


@dataclass(frozen=True, slots=True)
class Request:
    """The command's options."""

    num_windows: int
    num_context: int
    num_continuation: int
    part: str
    max_channels: int
    tp_size: int
    device: str
    dtype: str
    seed: int


def run(model_path: str, texts: list[Path], out: Path, request: Request) -> None:
    """Raises ConfigError and UnsupportedError."""
    if request.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {request.dtype}: allowed are {', '.join(_DTYPES)}")
    if (out.exists() and not out.is_file()) or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: not a file in a directory that exists")
    prompts = [prompt for file in texts for prompt in read_text(file)]
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = KVModel(model_path, device=device, dtype=_DTYPES[request.dtype])
    if model.num_heads % request.tp_size and request.tp_size % model.num_heads:
        raise ConfigError(f"--tp-size {request.tp_size}: {model.num_heads} KV heads cannot be shared out so")
    window_tokens = request.num_context + request.num_continuation
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and window_tokens > most:
        raise ConfigError(f"--context and --continuation are {window_tokens} tokens, the model has {most} positions")
    rope, notes = _rope_or_why_not(model)
    tokens = [part_of(model.tokenise(prompt), request.part) for prompt in prompts]
    windows = calibration_windows(model, tokens, request.num_windows, window_tokens)
    describe = Calibration(
        model=os.path.basename(os.path.normpath(model_path)),
        weights=fingerprint_model(model_path),
        text=", ".join(file.name for file in texts),
        num_windows=request.num_windows,
        context_tokens=request.num_context,
        continuation_tokens=request.num_continuation,
        notes=notes,
        part=request.part,
    )
    options = Options(
        num_context=request.num_context,
        max_channels=request.max_channels,
        tp_size=request.tp_size,
        seed=request.seed,
    )
    profile = calibrate(model, windows, rope, describe, options, _progress)
    profile.save(out)
    _report(profile, out)


def _rope_or_why_not(model: KVModel) -> tuple[Rope | None, tuple[str, ...]]:
    try:
        rope = rope_of_config(model.config)
        _require_same_rotation(model, rope)
        return rope, ()
    except UnsupportedError as e:
        note = f"K stays rotated, which costs bits: {e}"
        make_console(stderr=True).print(f"kvfetch: {note}")
        return None, (note,)


def _require_same_rotation(model: KVModel, rope: Rope) -> None:
    """Raises UnsupportedError where transformers, whose K we see, turns it by other angles than SGLang."""
    ours = rope.frequencies
    for theirs in model.inverse_frequencies():
        if theirs.shape != ours.shape or not torch.allclose(theirs.float().cpu(), ours, rtol=1e-4, atol=0):
            raise UnsupportedError("transformers rotates this model's K by other frequencies than SGLang")


def _progress(steps: Iterator[int], total: int, what: str) -> Iterator[int]:
    """A bar in a terminal; elsewhere, where a bar would show nothing, a line every ten seconds."""
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
        f"Measured on {held_out} windows of {profile.calibration.text} that the transform was not fitted to; bits are "
        f"order-0 entropies.\nThe context is worth {profile.context_kl:.2g} nats a token, so target_kl is "
        f"{profile.default_target_kl:.2g} unless it is set. The first {profile.num_sinks} tokens are kept exact.\n"
        f"Cells: {grid.cell_layers} layers, {grid.cell_heads} of {grid.num_heads} heads, K and V together.\n"
        f"{out}: profile {profile.digest}, {out.stat().st_size / 1e6:.1f} MB"
    )
