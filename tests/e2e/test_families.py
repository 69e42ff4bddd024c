"""Kinds of models, each as a tiny random one: families with full attention, computed as transformers does, and
restored; short convolutions and linear attention, whose states are stored with the KV cache of their pages; layers that
differ, which go on from what ``klt`` restores; and images: pages of one are never used for another one."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.models import (
    FAMILIES,
    IMAGE,
    IMAGE_TEXT,
    make_tiny,
    make_tiny_image_text,
    make_tiny_lfm2,
    make_tiny_qwen3_5,
)
from harness.stand_in_gpu import on_the_gpu_path
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.continuation import (
    calibrated,
    continue_by_layers,
    continue_from_quantised,
    goes_on_in_both_modes,
    restored_in_both_modes,
    started,
)
from tests.linker import needs_linker

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_stored_and_restored(family: str, store: StoreProcess, tmp_path: Path) -> None:
    model = make_tiny(tmp_path, family)
    with SGLangServer(model, extra_args=hicache_args(store.url)) as server:
        computed = ask(server, make_prompt(0))
        assert computed.output_ids == _greedy_tokens(model, make_prompt(0), len(computed.output_ids))
        wait_until_written(server, 640 // PAGE_SIZE)
        server.flush()
        ask(server, make_prompt(1))  # in the same slots, of which nothing is left
        wait_until_written(server, 2 * 640 // PAGE_SIZE)
        server.flush()
        restored = ask(server, make_prompt(0))
    assert from_storage(restored) >= 0.9 * 640
    assert same_answer(restored, computed)


def _greedy_tokens(model: Path, prompt: list[int], num_tokens: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        out = loaded.generate(torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


FLOAT32_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}  # as the rest of the model, so that answers can be compared
# Else SGLang fills a third of the memory with slots for states, and has no room for the host's.
FEW_STATES = ["--max-mamba-cache-size", "64"]
# SGLang keeps the state of LFM2 at the end of a prompt alone, and therefore wants pages of one token.
LFM2 = pytest.param(make_tiny_lfm2, 1, {}, id="short convolutions")
# Some of SGLang's kernels run in Triton's interpreter.
QWEN3_5 = pytest.param(make_tiny_qwen3_5, 16, {"TRITON_INTERPRET": "1"}, id="gated delta rule")


@pytest.mark.parametrize("mode", ["host", "device", "on the GPU path"])
@pytest.mark.parametrize(("make_model", "page_size", "env"), [LFM2, QWEN3_5])
def test_a_conversation_goes_on_from_stored_states_after_a_restart(
    make_model: Callable[[Path], Path],
    page_size: int,
    env: dict[str, str],
    mode: str,
    tmp_path: Path,
    store: StoreProcess,
) -> None:
    model = make_model(tmp_path / "model")
    start = make_prompt(0, 256)
    longer = [start + make_prompt(number, 64) for number in (1, 2)]
    mode_args: Callable[[str], list[str]] = hicache_args if mode == "host" else device_args
    if mode == "on the GPU path":
        env = env | on_the_gpu_path(tmp_path / "gpu")
    flags = ["--page-size", str(page_size), *FEW_STATES, *mode_args(store.url)]
    env = env | FLOAT32_STATES
    with SGLangServer(model, extra_args=flags, env=env) as server:
        assert from_storage(ask(server, start)) == 0
        # Under another salt, nothing of it is found.
        expected = [
            server.generate(input_ids=each, max_new_tokens=ANSWER_TOKENS, logprobs=True, cache_salt=f"other {number}")
            for number, each in enumerate(longer)
        ]
        assert [each.cached_tokens for each in expected] == [0, 0]
        wait_until_written(server, (len(start) + sum(map(len, longer))) // page_size)
    with SGLangServer(model, extra_args=flags, env=env) as server:
        with ThreadPoolExecutor(2) as pool:  # in device mode, one fetch serves both
            answers = list(pool.map(partial(ask, server), longer))
        assert ("of scratch memory on the GPU" in server.log()) == (mode == "on the GPU path")
    assert [each.cached_tokens for each in answers] == [len(start)] * 2
    assert max(map(from_storage, answers)) == len(start)  # in host mode, the other one may find it in the host pool
    assert all(map(same_answer, answers, expected))


@pytest.mark.parametrize(("make_model", "page_size", "env"), [LFM2, QWEN3_5])
def test_layers_that_sglang_keeps_elsewhere(
    make_model: Callable[[Path], Path],
    page_size: int,
    env: dict[str, str],
    store: StoreProcess,
    tmp_path: Path,
) -> None:
    """Their states are restored as they were, and K and V of the others from coefficients. SGLang goes on as
    transformers does from the same, in both modes. test_sliding_window.py has windows."""
    model = make_model(tmp_path / "model")
    profile = calibrated(model)
    assert {layer.pool for layer in profile.layers.layers} == {"state", "kv"}
    flags = ["--page-size", str(page_size), *FEW_STATES]
    goes_on_in_both_modes(model, profile, started(model, store, flags, env | FLOAT32_STATES), page_size)


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


TEXT = 64  # tokens in front of the image, and as many behind it
IMAGE_TOKENS = 64
SIZE = 256  # pixels in each direction, 32 of them a token


def picture(seed: int) -> str:
    """Return the URL of an image of random pixels."""
    pixels = torch.randint(0, 256, (SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask_about(server: SGLangServer, seed: int) -> Generation:
    before, behind = (" ".join(f"w{i}" for i in range(first, first + TEXT)) for first in (100, 300))
    return server.generate(
        f"{before} {IMAGE} {behind}", image=picture(seed), max_new_tokens=ANSWER_TOKENS, logprobs=True
    )


@needs_linker
def test_two_images_of_one_size_in_one_text(store: StoreProcess, tmp_path: Path) -> None:
    model = make_tiny_image_text(tmp_path / "model", "qwen3_vl")
    num_tokens = 2 * TEXT + IMAGE_TOKENS + 2
    with SGLangServer(model, extra_args=hicache_args(store.url)) as server:
        first = ask_about(server, 0)
        assert first.meta_info["prompt_tokens"] == num_tokens
        wait_until_written(server, num_tokens // PAGE_SIZE)
        server.flush()
        second = ask_about(server, 1)
        assert from_storage(second) == TEXT  # what is in front of the image
        assert not same_answer(second, first)
        wait_until_written(server, 2 * (num_tokens // PAGE_SIZE) - TEXT // PAGE_SIZE)
        expected = [first, second]
        for seed in (1, 0):
            server.flush()
            answer = ask_about(server, seed)
            assert from_storage(answer) == num_tokens // PAGE_SIZE * PAGE_SIZE
            assert same_answer(answer, expected[seed])
    with SGLangServer(model, extra_args=device_args(store.url, mode="read_only")) as server:
        for seed in (1, 0):
            server.flush()
            answer = ask_about(server, seed)
            assert from_storage(answer) == num_tokens // PAGE_SIZE * PAGE_SIZE
            assert same_answer(answer, expected[seed])
        server.flush()
        other = ask_about(server, 2)
        assert from_storage(other) == TEXT
        assert not any(same_answer(other, each) for each in expected)
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
