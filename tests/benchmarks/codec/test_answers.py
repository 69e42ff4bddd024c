from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.codec import answers
from sgl_kvfetch.codec.calibrate.model import KVModel


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> KVModel:
    return KVModel(str(tiny_llama))


def test_greedy_answers_of_several_caches_are_those_of_each(model: KVModel) -> None:
    prompts = [torch.arange(3 + i, 131 + i) for i in range(2)]
    tail = torch.arange(200, 216)
    caches = [model.kv(prompt) for prompt in prompts]
    together = answers.greedy_answers(model, caches, tail, 5)
    assert together == [answers.greedy_answers(model, [cache], tail, 5)[0] for cache in caches]
    ids = torch.cat((prompts[0], tail))
    for expected in together[0]:
        assert int(model.model(ids[None]).logits[0, -1].argmax()) == expected
        ids = torch.cat((ids, torch.tensor([expected])))


def test_passkeys_stand_somewhere_in_the_text(model: KVModel) -> None:
    text = " ".join(f"w{3 + i % 500}" for i in range(4000))
    made = answers.make_passkeys(model, [text], "0:1", 3, 256)
    assert [len(p.context) for p in made] == [256] * 3
    again = answers.make_passkeys(model, [text], "0:1", 3, 256)
    assert all(torch.equal(a.context, b.context) for a, b in zip(made, again, strict=True))
    assert len({tuple(p.context.tolist()) for p in made}) == 3


@pytest.mark.parametrize(
    ("successes", "count", "low", "high"), [(0, 10, 0.0, 0.278), (10, 10, 0.722, 1.0), (5, 10, 0.237, 0.763)]
)
def test_intervals_of_shares(successes: int, count: int, low: float, high: float) -> None:
    """The values are Wilson's, as tables have them."""
    assert answers.share_interval(successes, count) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
