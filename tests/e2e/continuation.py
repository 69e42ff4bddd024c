"""Transformers as the judge: what an engine should answer that goes on from quantised KV."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.codec.kv_model import KVModel
from sgl_kvfetch.codec.quant.base import Quantiser
from tests.segments import there_and_back


@torch.no_grad()
def continue_from_quantised(
    model_path: Path, prompt: list[int], num_cached: int, quantiser: Quantiser, num_new: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs by transformers, the first ``num_cached`` tokens' KV quantised."""
    model = KVModel(str(model_path))
    k, v = model.kv(torch.tensor(prompt[:num_cached]))
    restored = there_and_back(quantiser, {"k": k, "v": v})
    ids = prompt[num_cached:]
    logprobs: list[float] = []
    for _ in range(num_new):
        log_p = model.log_probabilities(restored["k"], restored["v"], torch.tensor(ids))[-1]
        ids = [*ids, int(log_p.argmax())]
        logprobs.append(float(log_p[ids[-1]]))
    return ids[len(ids) - num_new :], logprobs
