"""Bitstreams with wrong bytes, cut or prolonged, and manifests' bodies with other values."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from sgl_kvfetch.errors import CorruptError

Case = tuple[bytes, torch.Tensor, Callable[[bytes], torch.Tensor]]  # a bitstream, what it decodes to, the decoder


def share_that_is_corrupt(cases: Sequence[Case], num_mutations: int, head_bytes: int) -> float:
    """Decode bitstreams with wrong bytes, half of them within the head. Each decodes to its shape, or is corrupt: a
    flipped byte may decode to other integers, and that is what the checksums are for. Return the share of the latter.
    """
    rng = np.random.default_rng(3)
    num_corrupt = 0
    for number in range(num_mutations):
        bitstream, frames, decode = cases[number % len(cases)]
        bad = np.frombuffer(bitstream, np.uint8).copy()
        places = rng.integers(0, min(len(bad), head_bytes) if number % 2 else len(bad), 1 + number % 4)
        bad[places] ^= rng.integers(1, 256, len(places)).astype(np.uint8)
        end = rng.integers(0, 2 * len(bad)) if number % 5 == 0 else len(bad)
        try:
            assert decode(np.resize(bad, end).tobytes()).shape == frames.shape
        except CorruptError:
            num_corrupt += 1
    return num_corrupt / num_mutations


def mutate_body(data: bytes, rng: random.Random) -> bytes:
    """Return a MessagePack map with one value changed, dropped or doubled; ``data`` itself if it is none."""
    try:
        body = msgspec.msgpack.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return data
    node: Any = body
    path: list[tuple[Any, Any]] = []
    while isinstance(node, dict | list) and node and (not path or rng.random() < 0.8):
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        path.append((node, key))
        node = node[key]
    if not path:
        return data
    holder, key = path[-1]
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, copy.deepcopy(node))
        case 2 if isinstance(node, bytes | str):
            holder[key] = (node * rng.choice((0, 2, 3)))[: rng.randrange(1, 4096)]
        case 3 if isinstance(node, int):
            holder[key] = max(-(1 << 63), min((1 << 64) - 1, node + rng.choice((-1, 1, node, 1 << rng.randrange(63)))))
        case _:
            holder[key] = rng.choice(
                (None, 0, 1, 2, -1, 255, (1 << 64) - 1, b"", bytes(16), "", "a", [], {}, True, 0.5)
            )
    return msgspec.msgpack.encode(body)
