"""Transformers as the judge: what an engine should answer that goes on from quantised KV."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.types import TensorName


def continue_from_quantised(
    model_path: Path, prompt: list[int], num_cached: int, quantiser: Quantiser, num_new: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs by transformers, the first ``num_cached`` tokens' KV quantised."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        cache = model(torch.tensor([prompt[:num_cached]]), use_cache=True).past_key_values
        for index, layer in enumerate(cache.layers):
            layer.keys = _there_and_back(layer.keys, quantiser, "k", index)
            layer.values = _there_and_back(layer.values, quantiser, "v", index)
        ids = prompt[num_cached:]
        for _ in range(num_new):
            logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
            ids = [int(logits.argmax())]
            tokens += ids
            logprobs.append(float(logits.log_softmax(-1)[ids[0]]))
    return tokens, logprobs


def _there_and_back(kv: torch.Tensor, quantiser: Quantiser, tensor: TensorName, layer: int) -> torch.Tensor:
    """``kv``: (1, heads, tokens, dim)."""
    values = kv[0].transpose(0, 1).unsqueeze(1)  # (tokens, 1 layer, heads, dim)
    restored = quantiser.dequantise(quantiser.quantise(values, tensor, layer), kv.dtype, tensor, layer)
    return restored.squeeze(1).transpose(0, 1).unsqueeze(0).contiguous()
