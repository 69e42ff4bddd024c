"""Models whose layers differ: from calibration to answers of real SGLang that goes on from what ``klt`` restores."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.models import (
    IMAGE_TEXT,
    make_tiny,
    make_tiny_image_text,
    make_tiny_lfm2,
    make_tiny_qwen3_5,
)
from harness.store_process import StoreProcess
from sgl_kvfetch.codec import CalibrationOptions, LayeredModel, calibrate_model, map_layers
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Calibration, Profile
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.continuation import continue_by_layers, continue_from_quantised

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PAGES = 640 // PAGE_SIZE


def calibrated(model: Path) -> Profile:
    """Write a model's profile beside it."""
    import torch

    loaded = LayeredModel(str(model))
    layers, notes = map_layers(loaded)
    assert not notes
    windows = [torch.tensor(make_prompt(seed, 320)) for seed in range(100, 106)]
    describe = Calibration(model.name, fingerprint_model(str(model)), "words", len(windows), 256, 64)
    profile = calibrate_model(loaded, {"text": windows}, layers, describe, CalibrationOptions(num_context=256))
    profile.save(model.with_suffix(".profile"))
    return profile


@pytest.mark.parametrize("family", ["gemma3_text", "smollm3", "cohere2"])
def test_layers_that_rotate_differently(family: str, store: StoreProcess, tmp_path: Path) -> None:
    """Host mode stores, and both modes go on from what is restored, as transformers does from the same KV."""
    model = make_tiny(tmp_path / family, family)
    profile = calibrated(model)
    assert len({layer.rotation for layer in profile.layers.layers}) == 2
    answer, quantiser = restored_in_both_modes(model, profile, store)
    tokens, logprobs = continue_from_quantised(
        model, make_prompt(0), from_storage(answer), quantiser, len(answer.output_ids)
    )
    assert answer.output_ids == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)  # a coefficient may be rounded to its other neighbour


@pytest.mark.parametrize("family", IMAGE_TEXT)
def test_language_models_inside_image_text_checkpoints(family: str, store: StoreProcess, tmp_path: Path) -> None:
    """SGLang loads the encoder as well, and positions have three parts, which are equal for text."""
    model = make_tiny_image_text(tmp_path / family, family)
    profile = calibrated(model)
    assert {layer.rotation for layer in profile.layers.layers} == {0}
    answer, quantiser = restored_in_both_modes(model, profile, store)
    tokens, logprobs = continue_by_layers(model, make_prompt(0), from_storage(answer), quantiser, answer.output_ids)
    assert answer.output_ids == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)


def restored_in_both_modes(model: Path, profile: Profile, store: StoreProcess) -> tuple[Generation, KltQuantiser]:
    """Store a prompt in host mode, and go on from what is restored in both modes. Return the answer, which is equal in
    both, and what the prompt was stored with."""
    target_kl = profile.curve[1].kl  # a step that shows
    config: dict[str, Any] = {"profile": str(model.with_suffix(".profile")), "target_kl": target_kl}
    with SGLangServer(model, extra_args=hicache_args(store.url, **config)) as server:
        computed = ask(server, make_prompt(0))
        wait_until_written(server, PAGES)
        server.flush()
        answer = ask(server, make_prompt(0))
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
    assert from_storage(answer) >= 0.9 * 640
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-5)  # quantising was at work
    with SGLangServer(model, extra_args=device_args(store.url, **config, mode="read_only")) as server:
        again = ask(server, make_prompt(0))
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
    assert from_storage(again) == from_storage(answer)
    assert same_answer(again, answer)
    return answer, KltQuantiser(profile, target_kl)


LFM2 = pytest.param(make_tiny_lfm2, 1, {}, {"state", "kv"}, id="short convolutions")
QWEN3_5 = pytest.param(make_tiny_qwen3_5, PAGE_SIZE, {"TRITON_INTERPRET": "1"}, {"state", "kv"}, id="gated delta rule")


@pytest.mark.parametrize(("make_model", "page_size", "env", "pools"), [LFM2, QWEN3_5])
def test_layers_that_sglang_keeps_elsewhere(
    make_model: Callable[[Path], Path],
    page_size: int,
    env: dict[str, str],
    pools: set[str],
    store: StoreProcess,
    tmp_path: Path,
) -> None:
    """Their states are restored as they were, and K and V of the others from coefficients. SGLang goes on as
    transformers does from the same, in both modes. test_sliding_window.py has windows."""
    model = make_model(tmp_path / "model")
    profile = calibrated(model)
    assert {layer.pool for layer in profile.layers.layers} == pools
    # SGLang would fill a third of the memory with slots for states. They are of the type that the model is of.
    flags = ["--page-size", str(page_size), "--max-mamba-cache-size", "64"]
    env = env | {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    goes_on_in_both_modes(model, profile, started(model, store, flags, env), page_size)


Serve = Callable[..., AbstractContextManager[SGLangServer]]  # with the mode, and keys of the config


def started(model: Path, store: StoreProcess, flags: list[str], env: dict[str, str]) -> Serve:
    """Return what starts a server for each mode."""

    def serve(mode: str, /, **config: Any) -> SGLangServer:
        mode_args = hicache_args if mode == "host" else device_args
        return SGLangServer(model, extra_args=[*flags, *mode_args(store.url, **config)], env=env)

    return serve


def goes_on_in_both_modes(
    model: Path,
    profile: Profile,
    serve: Serve,
    page_size: int = PAGE_SIZE,
    num_tokens: int = 256,
    num_compared: int | None = None,
) -> None:
    """Store a prompt of ``num_tokens`` in host mode, and go on from it with a longer one in both modes, as transformers
    does. ``num_compared``: how many tokens transformers is to answer alike; None for all."""
    target_kl = profile.curve[2].kl
    config: dict[str, Any] = {"profile": str(model.with_suffix(".profile")), "target_kl": target_kl}
    start = make_prompt(0, num_tokens)
    longer = start + make_prompt(1, 64)
    with serve("host", **config) as server:
        assert from_storage(ask(server, start)) == 0
        wait_until_written(server, len(start) // page_size)
    answers = []
    for mode in ("host", "device"):
        with serve(mode, **config | {"mode": "read_only"}) as server:
            answers.append(ask(server, longer))
            assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
    answer, again = answers
    assert from_storage(answer) == from_storage(again) == len(start)
    assert same_answer(again, answer)
    quantiser = KltQuantiser(profile, target_kl)
    tokens, logprobs = continue_by_layers(model, longer, len(start), quantiser, answer.output_ids)
    assert answer.output_ids[:num_compared] == tokens[:num_compared]
    assert answer.logprobs[:num_compared] == pytest.approx(logprobs[:num_compared], abs=5e-3)
    _, exact = continue_by_layers(model, longer, len(start), None, answer.output_ids)
    assert answer.logprobs[:num_compared] != pytest.approx(exact[:num_compared], abs=1e-5)  # quantising was at work
