"""A method that forgets the context, to show how large KL can get."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.types import TensorName


class Mean(TensorMethod):
    """Replaces every token by each channel's mean over the context. It is no useful method, but its KL is a scale for
    that of the others: if a model makes little use of its context, every method has a low KL."""

    name = "mean"
    source = "none: all tokens alike, for the scale of KL"
    family = "context forgotten"

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        yield to_bytes(values.float().mean(0).to(KV_DTYPE))

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        return from_bytes(next(parts), KV_DTYPE, shape[1:]).expand(shape).contiguous()
