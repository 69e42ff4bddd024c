"""Transformers as the judge: what an engine should answer that goes on from quantised KV."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.types import TENSORS, TensorName
from tests.segments import there_and_back


def continue_from_quantised(
    model_path: Path, prompt: list[int], num_cached: int, quantiser: Quantiser, num_new: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs by transformers, the first ``num_cached`` tokens' KV quantised."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    tokens: list[int] = []
    logprobs: list[float] = []
    with torch.no_grad():
        cache = model(torch.tensor([prompt[:num_cached]]), use_cache=True).past_key_values
        values: dict[TensorName, torch.Tensor] = {
            "k": torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers], dim=1),
            "v": torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers], dim=1),
        }
        restored = there_and_back(quantiser, values)
        for index, layer in enumerate(cache.layers):
            layer.keys, layer.values = (restored[t][:, index].transpose(0, 1)[None].contiguous() for t in TENSORS)
        ids = prompt[num_cached:]
        for _ in range(num_new):
            logits = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits[0, -1]
            ids = [int(logits.argmax())]
            tokens += ids
            logprobs.append(float(logits.log_softmax(-1)[ids[0]]))
    return tokens, logprobs
