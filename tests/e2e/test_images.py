"""Prompts with images on real SGLang: pages of one image are never used for another one."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
import torch
from PIL import Image

from harness.engine import Generation, SGLangServer, device_args, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.models import IMAGE, make_tiny_image_text
from harness.store_process import StoreProcess
from tests.e2e.conftest import ANSWER_TOKENS, PAGE_SIZE, from_storage, same_answer
from tests.linker import needs_linker

pytestmark = [pytest.mark.sglang, pytest.mark.slow, needs_linker]

TEXT = 64  # tokens in front of the image, and as many behind it
IMAGE_TOKENS = 64
SIZE = 256  # pixels in each direction, 32 of them a token


def picture(seed: int) -> str:
    """Return the URL of an image of random pixels."""
    pixels = torch.randint(0, 256, (SIZE, SIZE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def ask(server: SGLangServer, seed: int) -> Generation:
    before, behind = (" ".join(f"w{i}" for i in range(first, first + TEXT)) for first in (100, 300))
    return server.generate(
        f"{before} {IMAGE} {behind}", image=picture(seed), max_new_tokens=ANSWER_TOKENS, logprobs=True
    )


def test_two_images_of_one_size_in_one_text(store: StoreProcess, tmp_path: Path) -> None:
    model = make_tiny_image_text(tmp_path / "model", "qwen3_vl")
    num_tokens = 2 * TEXT + IMAGE_TOKENS + 2
    with SGLangServer(model, extra_args=hicache_args(store.url)) as server:
        first = ask(server, 0)
        assert first.meta_info["prompt_tokens"] == num_tokens
        wait_until_written(server, num_tokens // PAGE_SIZE)
        server.flush()
        second = ask(server, 1)
        assert from_storage(second) == TEXT  # what is in front of the image
        assert not same_answer(second, first)
        wait_until_written(server, 2 * (num_tokens // PAGE_SIZE) - TEXT // PAGE_SIZE)
        expected = [first, second]
        for seed in (1, 0):
            server.flush()
            answer = ask(server, seed)
            assert from_storage(answer) == num_tokens // PAGE_SIZE * PAGE_SIZE
            assert same_answer(answer, expected[seed])
    with SGLangServer(model, extra_args=device_args(store.url, mode="read_only")) as server:
        for seed in (1, 0):
            server.flush()
            answer = ask(server, seed)
            assert from_storage(answer) == num_tokens // PAGE_SIZE * PAGE_SIZE
            assert same_answer(answer, expected[seed])
        server.flush()
        other = ask(server, 2)
        assert from_storage(other) == TEXT
        assert not any(same_answer(other, each) for each in expected)
        assert read_metric(server.metrics(), "sgl_kvfetch_misses_total") == 0
