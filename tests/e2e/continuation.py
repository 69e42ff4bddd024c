"""Transformers as the judge: what an engine should answer that goes on from quantised KV."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.codec.kv_model import KVModel
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
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


@torch.no_grad()
def continue_by_layers(
    model_path: Path, prompt: list[int], num_cached: int, quantiser: KltQuantiser | None, output: list[int]
) -> tuple[list[int], list[float]]:
    """The most likely tokens, and logprobs of ``output``, where the first ``num_cached`` tokens' K and V are quantised
    in the layers that a profile is of. What other layers keep is as it was. Without a quantiser, all is."""
    model = LayeredModel(str(model_path))
    following = torch.tensor([*prompt[num_cached:], *output[:-1]])
    calls, after_calls = model.calls(num_cached), model.calls(len(following), num_cached)
    passed = []
    hidden = model.embed(torch.tensor(prompt[:num_cached]))
    for number in range(model.num_layers):
        with model.layer(number) as layer:
            hidden, past = layer.forward(hidden, calls)
        passed.append(past)
    if quantiser is not None:
        coded = quantiser.profile.layers.coded
        pairs = [past for number in coded if isinstance(past := passed[number], KV)]
        k, v = (torch.stack(x, dim=1) for x in zip(*((each.k, each.v) for each in pairs), strict=True))
        restored = there_and_back(quantiser, {"k": k, "v": v})
        for index, number in enumerate(coded):
            passed[number] = KV(restored["k"][:, index], restored["v"][:, index], pairs[index].indexer)
    after = model.embed(following)
    for number, past in enumerate(passed):
        with model.layer(number) as layer:
            after = layer.after(after, after_calls, past)
    log_p = model.log_probabilities(after)[-len(output) :]
    return log_p.argmax(-1).tolist(), log_p[range(len(output)), output].tolist()
