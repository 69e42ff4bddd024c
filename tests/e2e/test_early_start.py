"""Early start on a real model: requests compute while their last pages are decoded, and get the same answers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from sglang.srt.mem_cache.radix_cache import RadixKey

from benchmarks.prose import prose
from harness.engine import Generation, SGLangServer, device_args
from harness.metrics import read_metric, wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.calibrate.text import cut_windows, prompt_start, tokenise
from sgl_kvfetch.codec.container.manifest import Cell, decode_manifest
from sgl_kvfetch.plugin.page_hashes import hash_bytes, hash_tail
from tests.e2e.conftest import from_storage

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGE_SIZE = 64
NUM_TOKENS, NUM_STORED = 1280, 1024
FLAGS = ["--context-length", "4096", "--max-total-tokens", "12288", "--page-size", str(PAGE_SIZE)]
NUM_PROMPTS = 3  # further ones have a group of layers that cannot be decoded
GROUPS = (0, 5, 9)
ATTEMPTS = 20  # on a busy machine, a request may come to its turn only after its pages have come, or failed


@dataclass(frozen=True)
class Stored:
    """A store with the beginnings of some prompts, and the answers to the prompts without it."""

    directory: Path
    model: Path
    prompts: list[list[int]]
    computed: list[Generation]


def answer(server: SGLangServer, prompt: list[int]) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=8)


@pytest.fixture(scope="module")
def stored(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Stored:
    from transformers import AutoTokenizer

    tokeniser = AutoTokenizer.from_pretrained(real_model)
    num_prompts = NUM_PROMPTS + len(GROUPS)
    windows = cut_windows([tokenise(tokeniser, prose())], num_prompts, NUM_TOKENS, prompt_start(tokeniser))
    prompts = [window.tolist() for window in windows]
    directory = tmp_path_factory.mktemp("early") / "store"
    with StoreProcess(directory) as store:
        # Exact, so that a fetched prefix has the same answer as a computed one.
        flags = [*device_args(store.url, quantiser="exact", codec="hevc"), *FLAGS]
        with SGLangServer(real_model, extra_args=flags) as server:
            for prompt in prompts:
                server.generate(input_ids=prompt[:NUM_STORED], max_new_tokens=1)
            wait_until_written(server, num_prompts * NUM_STORED // PAGE_SIZE)
            computed = [answer(server, prompt) for prompt in prompts]
    for prompt, group in zip(prompts[NUM_PROMPTS:], GROUPS, strict=True):
        spoil(directory, prompt, group)
    return Stored(directory, real_model, prompts, computed)


def spoil(directory: Path, prompt: list[int], group: int) -> None:
    """Let the first pages of a prompt decode to something else than what was stored, in one group of layers."""
    (first,) = hash_bytes(hash_tail(RadixKey(array("q", prompt[:PAGE_SIZE])), 0, None, PAGE_SIZE))
    for path in directory.glob("**/*.kvm"):
        manifest = decode_manifest(path.read_bytes())
        if first in manifest.page_hashes:
            (variant,) = manifest.variants
            index = manifest.cell_index(Cell(0, group, 0)) * manifest.chunks_per_cell
            chunks = list(variant.chunks)
            chunks[index] = structs.replace(chunks[index], decoded_checksum=bytes(16))
            spoilt = structs.replace(variant, chunks=tuple(chunks))
            path.write_bytes(structs.replace(manifest, variants=(spoilt,)).encode())


@pytest.fixture(scope="module")
def early(stored: Stored) -> Iterator[SGLangServer]:
    with StoreProcess(stored.directory) as store:
        config: dict[str, Any] = {
            "quantiser": "exact",
            "codec": "hevc",
            "mode": "read_only",
            "device": {"early_start": True},
            "codec_threads": 1,
        }
        with SGLangServer(stored.model, extra_args=[*device_args(store.url, **config), *FLAGS]) as server:
            for num_tokens in (48, 100, 200, 400):  # so that it knows how fast it computes
                server.generate(input_ids=[*range(1000, 1000 + num_tokens)], max_new_tokens=1)
            yield server


def passes(server: SGLangServer, result: str) -> float:
    return read_metric(server.metrics(), "sgl_kvfetch_early_passes_total", result=result)


def ask_again(server: SGLangServer, stored: Stored, number: int) -> Generation:
    server.flush()
    return answer(server, stored.prompts[number])


def test_requests_start_early_and_get_the_same_answers(early: SGLangServer, stored: Stored) -> None:
    """The first fetch measures how fast pages are decoded."""
    before = passes(early, "whole")
    for attempt in range(ATTEMPTS):
        number = attempt % NUM_PROMPTS
        found = ask_again(early, stored, number)
        assert found.output_ids == stored.computed[number].output_ids
        if passes(early, "whole") > before:
            assert from_storage(found) >= 0.9 * NUM_STORED
            return
    pytest.fail("no request started early")


@pytest.mark.parametrize("group", GROUPS)
def test_layers_that_fail_after_the_start_are_computed(early: SGLangServer, stored: Stored, group: int) -> None:
    """Three layers of a prompt's pages decode to something else than what was stored, although their bytes are sound.
    A request starts when some layers are still missing, the last ones among them."""
    before = passes(early, "discarded")
    number = NUM_PROMPTS + GROUPS.index(group)
    for _ in range(ATTEMPTS):
        assert ask_again(early, stored, number).output_ids == stored.computed[number].output_ids
        if group != GROUPS[-1] or passes(early, "discarded") > before:
            break
    else:
        pytest.fail("no request started early")
    assert ask_again(early, stored, 0).output_ids == stored.computed[0].output_ids
