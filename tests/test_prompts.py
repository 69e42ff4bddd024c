from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import page_hashes, read_prompts, tokenise


@pytest.mark.sglang
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("salt", [None, "", "tenant", "ünïcode"])
def test_page_hashes_are_sglangs(page_size: int, salt: str | None) -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    rng = random.Random(page_size)
    tokens = [rng.choice((0, 1, 70_000, (1 << 32) - 1)) for _ in range(100)]
    key = RadixKey(array("q", tokens), cache_salt=salt or None)  # SGLang takes an empty one for none
    expected = get_storage_hash_str(key.page_aligned(page_size), None, page_size=page_size)
    assert [page_hash.hex() for page_hash in page_hashes(tokens, page_size, salt)] == expected
    assert len(expected) == 100 // page_size


def test_files_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": [1, 2]}\n')
    assert read_prompts(file) == ["one", [1, 2]]
    for line in ("{}", '{"prompt": [-1]}', '{"prompt": [1.5]}', '{"prompt": [4294967296]}'):
        file.write_text(line)
        with pytest.raises(ConfigError, match=r"a.jsonl:1: expected an object with a 'prompt'"):
            read_prompts(file)


def test_texts_are_tokenised_by_the_model(tiny_llama: Path) -> None:
    assert tokenise(str(tiny_llama), ["w5 w6", [7, 8]]) == [[5, 6], [7, 8]]
    assert tokenise("/no/such/model", [[7]]) == [[7]]
