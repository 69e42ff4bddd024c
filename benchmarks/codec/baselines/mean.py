"""A method that forgets the context, to show how large KL can get."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.codec.method import KV_DTYPE, KVShape, Method, from_bytes, to_bytes
from sgl_kvfetch.types import TENSORS


class Mean(Method):
    """Replaces every token by each channel's mean over the context. It is no useful method, but its KL is a scale for
    that of the others: if a model makes little use of its context, every method has a low KL."""

    name = "mean"
    source = "none: all tokens alike, for the scale of KL"
    family = "context forgotten"

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        return [to_bytes(x.float().mean(0).to(KV_DTYPE)) for x in (k, v)]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [shape.of_tensor(tensor) for tensor in TENSORS]
        k, v = (from_bytes(part, KV_DTYPE, s[1:]).expand(s).contiguous() for part, s in zip(parts, shapes, strict=True))
        return k, v
