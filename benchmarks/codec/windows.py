"""Cuts text into windows that fit a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.report import whole_number
from sgl_kvfetch.codec.calibrate.text import cut_windows, part_of
from sgl_kvfetch.errors import ConfigError


def add_window_arguments(parser: argparse.ArgumentParser, part: str) -> None:
    """Add the arguments for a model, its profile, and the windows of a text whose KV cache is coded. ``part``: the
    default of --part."""
    parser.add_argument("--model", required=True, help="any transformers path")
    parser.add_argument("--profile", type=Path, required=True, help="the model's, by kvfetch calibrate")
    parser.add_argument("--text", type=Path, required=True, help="plain text, or JSONL with `prompt`")
    parser.add_argument("--part", default=part, help="the part of it to code")
    parser.add_argument("--context", type=whole_number, default=1024, help="tokens of a window")


def windows_of(model: KVModel, texts: Sequence[str], part: str, count: int, length: int) -> list[torch.Tensor]:
    """Cut ``count`` windows of ``(length,)`` ids from a part of each text.

    Raises ConfigError if the texts are too short, or if the model has fewer than ``length`` positions.
    """
    windows = cut_windows([part_of(model.tokenise(text), part) for text in texts], count, length, model.start)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ConfigError(f"windows have {length} tokens; the model has only {most} positions")
    return windows
