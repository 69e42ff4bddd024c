from __future__ import annotations

import pytest
import torch

from benchmarks.codec.method import KVShape
from benchmarks.codec.segments import PAGE_TOKENS, SegmentMethod
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import UnsupportedError
from tests.benchmarks.codec.kv import make_kv


def test_all_that_a_writer_would_store_is_counted() -> None:
    k, v = make_kv(3 * PAGE_TOKENS)
    method = SegmentMethod("exact/zstd", "", "", make_quantiser("exact"), "zstd")
    parts = method.encode(k, v)
    manifests = [decode_manifest(part) for part in parts[::2]]
    assert [(m.first_page, m.num_pages) for m in manifests] == [(0, 2), (2, 1)]
    for manifest, data in zip(manifests, parts[1::2], strict=True):
        assert manifest.data_bytes(manifest.variants[0]) == len(data)
        assert manifest.namespace.page_size == PAGE_TOKENS
    assert method.code(k, v).num_bytes == sum(map(len, parts))
    restored_k, restored_v = method.decode(parts, KVShape.of(k, v))
    assert torch.equal(restored_k, k)
    assert torch.equal(restored_v, v)


def test_tokens_must_be_whole_pages() -> None:
    k, v = make_kv(PAGE_TOKENS + 1)
    with pytest.raises(UnsupportedError, match="65 tokens; expected a multiple of 64"):
        SegmentMethod("exact/zstd", "", "", make_quantiser("exact"), "zstd").encode(k, v)
