"""``kvfetch why`` on real stores: each reason, made on purpose, has its name. What needs SGLang is in tests/e2e."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from harness.small_segments import NAMESPACE, put_segment
from sgl_kvfetch.codec.container.encryption import EncryptionKeys
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.container.signing import ManifestKeys
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.prompts import page_hashes
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.stores.base import Store
from tests.codec.container.test_levels import segment as segment_of_levels
from tests.tools.conftest import KEY, kvfetch, kvfetch_json

TOKENS = list(range(3, 19))


def coded(
    namespace: Namespace = NAMESPACE, pages: range = range(8), *, heads: range = range(1), salt: str | None = None
) -> CodedSegment:
    """A segment with some of the prompt's pages."""
    spec = SegmentSpec(HeadSlice(namespace, heads), make_quantiser("exact"), "zstd", "240p", 8)
    shape = len(pages) * namespace.page_size, 1, len(heads), 48
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    hashes = page_hashes(TOKENS, namespace.page_size, salt)
    previous = hashes[pages.start - 1] if pages.start else None
    coded = encode_segment(spec, {"k": values, "v": values}, pages.start, previous, hashes[pages.start : pages.stop])
    if namespace.quantiser == make_quantiser("exact").identity:
        return coded
    return replace(coded, manifest=msgspec.structs.replace(coded.manifest, namespace=namespace))


def store(root: Path, *segments: CodedSegment) -> None:
    async def put() -> None:
        opened = LocalStore(root)
        for each in segments:
            await put_segment(opened, each)
        await opened.close()

    asyncio.run(put())


def why(root: Path, *args: str, prompt: Sequence[int] = TOKENS[:8], exit_code: int = 1) -> dict[str, Any]:
    (found,) = kvfetch_json("why", str(root), "--prompt", str(list(prompt)), *args, exit_code=exit_code)
    assert {each["reason"] for each in found["findings"]} <= set(Reason)
    return dict(found)


def only_reason(found: dict[str, Any]) -> tuple[str, int, int]:
    (finding,) = found["findings"]
    return finding["reason"], finding["first_page"], finding["end_page"]


def test_a_prompt_that_is_stored(tmp_path: Path) -> None:
    store(tmp_path, coded())
    found = why(tmp_path, exit_code=0)
    assert (found["stored_pages"], found["findings"], found["namespace"]) == (8, [], NAMESPACE.digest())
    text = kvfetch("why", str(tmp_path), "--prompt", str(TOKENS[:8])).output
    assert "nothing is in the way" in text


def test_pages_that_were_never_written(tmp_path: Path) -> None:
    store(tmp_path, coded(pages=range(4)))
    found = why(tmp_path)
    assert only_reason(found) == ("never_written", 4, 8)
    assert found["stored_pages"] == 4
    assert only_reason(why(tmp_path, prompt=[7, 7, 7]))[0] == "never_written"
    text = kvfetch("why", str(tmp_path), "--prompt", str(TOKENS[:8])).output
    assert "never_written: pages 4 to 7: the store has no trace of them" in text
    assert "what to do: see sgl_kvfetch_written_pages_total" in text
