"""Cuts text into windows that fit a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.codec.calibrate.model import KVModel, cut_windows, part_of
from sgl_kvfetch.errors import ConfigError


def windows_of(model: KVModel, texts: Sequence[str], part: str, count: int, length: int) -> list[torch.Tensor]:
    """Cut ``count`` windows of ``(length,)`` ids from a part of each text.

    Raises ConfigError if the texts are too short, or if the model has fewer than ``length`` positions.
    """
    windows = cut_windows([part_of(model.tokenise(text), part) for text in texts], count, length, model.start)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ConfigError(f"windows have {length} tokens; the model has only {most} positions")
    return windows
