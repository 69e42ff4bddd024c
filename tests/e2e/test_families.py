"""Kinds of models, each as a tiny random one: families with full attention, which go on from what ``klt`` restores as
transformers does; short convolutions and linear attention, whose states are stored with their pages; and images: pages
of one are never used for another one."""

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
    OTHER_FAMILIES,
    make_tiny,
    make_tiny_deepseek,
    make_tiny_image_text,
    make_tiny_lfm2,
    make_tiny_qwen3_5,
)
from harness.stand_in_gpu import on_the_gpu_path
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.continuation import (
    calibrated,
    goes_on_in_both_modes,
    started,
)

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


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


def make(directory: Path, family: str) -> Path:
    if family in IMAGE_TEXT:
        return make_tiny_image_text(directory, family)
    return make_tiny_deepseek(directory) if family == MLA else make_tiny(directory, family, OTHER_FAMILIES.get(family))


MLA = "deepseek_v3"
TWO_ROTATIONS = {"gemma3_text", "smollm3", "cohere2"}
SEEN = ("granitemoehybrid", "kimi_linear", "nemotron_h", "olmo3", "phi3", "qwen3_next")
# These need SGLang's Triton backend in Triton's interpreter, which takes minutes: `torch_native` is refused for them,
# or has no learned sinks.
IN_TRITON = ("exaone4", "gemma4_text", "gpt_oss", "mimo_v2_flash")


@pytest.mark.parametrize("family", dict.fromkeys((*FAMILIES, *IMAGE_TEXT, MLA, *SEEN, *IN_TRITON)))
def test_a_family_goes_on_from_what_klt_restores(family: str, store: StoreProcess, tmp_path: Path) -> None:
    """As transformers does from the same."""
    model = make(tmp_path / "model", family)
    flags, env, num_tokens, num_compared = [], {}, 256, None
    if family in IN_TRITON:
        flags, env, num_tokens = ["--attention-backend", "triton"], {"TRITON_INTERPRET": "1"}, 128
        num_compared = 1  # there, the tokens that follow see one token less than the window
    if family == "mimo_v2_flash":
        # Transformers writes a rotation for each kind of layer, and SGLang takes that for one.
        flags += ["--json-model-override-args", '{"rope_scaling": null}']
    profile = calibrated(model)
    if family in TWO_ROTATIONS:
        assert len({layer.rotation for layer in profile.layers.layers}) == 2
    if any(layer.pool == "state" for layer in profile.layers.layers):
        flags, env = FEW_STATES, {"TRITON_INTERPRET": "1", **FLOAT32_STATES}
    serve = started(model, store, flags, env)
    goes_on_in_both_modes(model, profile, serve, num_tokens=num_tokens, num_compared=num_compared)


FALCON_H1 = {
    "head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "mamba_rms_norm": True,
}


@pytest.mark.parametrize("mode", ["host", "device"])
def test_attention_and_a_state_in_each_layer(mode: str, store: StoreProcess, tmp_path: Path) -> None:
    """There is no ``klt`` for them."""
    make = partial(make_tiny, family="falcon_h1", changes=FALCON_H1)
    env = {"TRITON_INTERPRET": "1"}
    test_a_conversation_goes_on_from_stored_states_after_a_restart(make, 16, env, mode, tmp_path, store)


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
