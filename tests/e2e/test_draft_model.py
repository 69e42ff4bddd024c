"""Speculation with a draft model, whose KV cache is a side pool, on real SGLang and in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.metrics import wait_until_written, written
from harness.models import TinyLlama, make_tiny_llama
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile
from tests.e2e.conftest import PAGE_SIZE, from_storage
from tests.e2e.continuation import continue_by_layers
from tests.e2e.drafts import ask, serve
from tests.e2e.shared import attach, detach
from tests.e2e.test_layer_maps import calibrated

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

SHAPE = TinyLlama(hidden_size=128, intermediate_size=256, num_layers=2, num_heads=2)
PROMPT = list(range(3, 131))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a draft model like it, and another one."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("model", 0), ("draft", 0), ("other", 1)):
        make_tiny_llama(folder / name, SHAPE, seed=seed)
    return folder


@pytest.fixture(scope="module")
def profile(models: Path) -> Profile:
    return calibrated(models / "model")


@pytest.mark.parametrize("mode", ["host", "device", "on the GPU path"])
def test_a_draft_model_goes_on_from_what_it_stored(
    mode: str, models: Path, profile: Profile, store: StoreProcess
) -> None:
    model, target_kl = models / "model", profile.curve[1].kl
    with serve(mode, "STANDALONE", model, models / "draft", store) as server:
        computed, accepted = ask(server, prompt=PROMPT)
        assert from_storage(computed) == 0
        assert len(set(computed.output_ids)) > 3  # else any KV cache would do
        assert accepted > 3  # the draft model computes as the model does
        wait_until_written(server, len(PROMPT) // PAGE_SIZE)
        server.flush()
        restored, accepted_again = ask(server, prompt=PROMPT)
        assert from_storage(restored) >= len(PROMPT) - PAGE_SIZE
        assert restored.output_ids == computed.output_ids
        assert accepted_again == accepted

        server.flush()
        detach(server)
        attach(server, store.url, profile=str(model.with_suffix(".profile")), target_kl=target_kl)
        with written(server, len(PROMPT) // PAGE_SIZE):
            assert from_storage(ask(server, prompt=PROMPT)[0]) == 0
        server.flush()
        quantised, accepted_again = ask(server, prompt=PROMPT)
        num_cached = from_storage(quantised)
        assert num_cached >= len(PROMPT) - PAGE_SIZE
        assert accepted_again > 3  # else the draft model's cells would not be those of its prompt
    quantiser = KltQuantiser(profile, target_kl)
    tokens, logprobs = continue_by_layers(model, PROMPT, num_cached, quantiser, quantised.output_ids)
    assert quantised.output_ids == tokens
    assert quantised.logprobs == pytest.approx(logprobs, abs=5e-3)
    assert quantised.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-5)  # quantising was at work
    if mode == "on the GPU path":
        return  # what follows is a matter of names, which device mode has tried
    with serve(mode, "STANDALONE", model, models / "other", store) as server:
        answer, accepted = ask(server, prompt=PROMPT)
        assert from_storage(answer) == 0
        assert answer.output_ids == computed.output_ids
        assert accepted < 2
