"""What ``kvfetch calibrate`` does, once its options are read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from sgl_kvfetch.calibrate.fit import Options, calibrate
from sgl_kvfetch.calibrate.model import KVModel, cut_windows, part_of, read_text
from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.tables import make_table
from sgl_kvfetch.config import DEFAULT_TARGET_KL
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.fingerprint import fingerprint_model
from sgl_kvfetch.quant.profile import Calibration, Profile
from sgl_kvfetch.quant.rope import Rope, rope_of_config

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # in float16 the gradients would be lost


@dataclass(frozen=True, slots=True)
class Request:
    """The command's options."""

    num_windows: int
    num_context: int
    num_continuation: int
    part: str
    max_block_channels: int
    tp_size: int
    device: str
    dtype: str
    seed: int


def run(model_path: str, text: Path, out: Path, request: Request) -> None:
    """Raises ConfigError and UnsupportedError."""
    if request.dtype not in _DTYPES:
        raise ConfigError(f"--dtype {request.dtype}: allowed are {', '.join(_DTYPES)}")
    if (out.exists() and not out.is_file()) or not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: not a file in a directory that exists")
    texts = read_text(text)
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    model = KVModel(model_path, device=device, dtype=_DTYPES[request.dtype])
    if model.num_heads % request.tp_size and request.tp_size % model.num_heads:
        raise ConfigError(f"--tp-size {request.tp_size}: {model.num_heads} KV heads cannot be shared out so")
    window_tokens = request.num_context + request.num_continuation
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and window_tokens > most:
        raise ConfigError(f"--context and --continuation are {window_tokens} tokens, the model has {most} positions")
    rope, notes = _rope_or_why_not(model)
    tokens = [part_of(model.tokenise(t), request.part) for t in texts]
    windows = cut_windows(tokens, request.num_windows, window_tokens, model.start)
    describe = Calibration(
        model=os.path.basename(os.path.normpath(model_path)),
        weights=fingerprint_model(model_path),
        text=text.name,
        num_windows=request.num_windows,
        context_tokens=request.num_context,
        continuation_tokens=request.num_continuation,
        notes=notes,
        part=request.part,
    )
    options = Options(
        num_context=request.num_context,
        max_block_channels=request.max_block_channels,
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
    yield from track(steps, what, total, console=make_console(stderr=True), transient=True)


def _report(profile: Profile, out: Path) -> None:
    table = make_table((), ("target_kl", "step", "bits a value", "bf16 is larger by"))
    for point in profile.curve:
        ratio = f"{16 / point.bits_per_value:.1f}x" if point.bits_per_value else ""
        table.add_row(f"{point.kl:.2g}", f"{point.step:.3g}", f"{point.bits_per_value:.2f}", ratio)
    console = make_console()
    console.print(table)
    finest, coarsest = profile.curve[0].kl, profile.curve[-1].kl
    if not finest <= DEFAULT_TARGET_KL <= coarsest:
        console.print(
            f"target_kl must be set: {DEFAULT_TARGET_KL:g}, which it is otherwise, is not between {finest:.2g} and "
            f"{coarsest:.2g}",
            style="yellow",
        )
    held_out = max(1, profile.calibration.num_windows // 5)
    console.print(
        f"Measured on {held_out} windows of {profile.calibration.text} that the transform was not fitted to; bits are "
        f"order-0 entropies.\n{out}: profile {profile.digest}, {out.stat().st_size / 1e6:.1f} MB"
    )
