"""What the memory benchmark measures with, on a fetch as small as it can be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.memory import (
    GOAL_BYTES,
    PAGE_TOKENS,
    SPAN_TOKENS,
    Point,
    Setup,
    in_a_fresh_process,
    repeated_segments,
    report,
    store_prefix,
)
from benchmarks.sampler import Sampler
from harness.small_segments import page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentReader
from sgl_kvfetch.codec.quant.base import CellValues
from tests.codec.quant.profiles import make_profile


def test_segments_are_what_readers_expect() -> None:
    setup = Setup("uint8", "zstd", layers=1)
    (segment,) = repeated_segments(setup, 2 * SPAN_TOKENS)
    assert segment.manifest.page_hashes == tuple(page_hashes(2 * SPAN_TOKENS // PAGE_TOKENS))
    reader = SegmentReader(segment.manifest, setup.make_quantiser())
    first, second = decoded(segment, reader)
    for values in (*first, *second):
        assert values.shape == (SPAN_TOKENS, 1, 8, 128)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_segments_of_a_profile_are_what_readers_expect(tmp_path: Path) -> None:
    """Four layers were asked for: two whole cells, of which the profile's last one is smaller."""
    make_profile(num_layers=5, num_heads=4, cell_heads=4).save(tmp_path / "profile")
    setup = Setup("klt", "hevc", layers=4, profile=str(tmp_path / "profile"))
    (segment,) = repeated_segments(setup, SPAN_TOKENS)
    reader = SegmentReader(segment.manifest, setup.make_quantiser())
    cells = decoded(segment, reader)
    assert [values.k.shape for values in cells] == [(SPAN_TOKENS, 3, 4, 16), (SPAN_TOKENS, 2, 4, 16)]
    assert {chunk.codec for chunk in reader.variant.chunks} == {"hevc", "zstd"}


def decoded(segment: CodedSegment, reader: SegmentReader) -> list[CellValues]:
    cells = segment.manifest.cells()
    parts = [(cell, reader.decode_cell(cell, segment.data[slice(*reader.cell_range(cell))])) for cell in cells]
    return [reader.dequantise_cell(cell, quantised) for cell, quantised in parts]


def test_the_sampler_sees_what_is_held_for_a_moment() -> None:
    held = iter([(10, 100), (12, 130), (11, 140)])
    last = (10, 100)

    def now() -> tuple[int, int]:
        nonlocal last
        last = next(held, last)
        return last

    with Sampler(now) as sampler:
        while sampler.num_samples < 3:
            pass
    assert sampler.peaks == [2, 40]


@pytest.mark.slow
async def test_a_fetch_is_measured(tmp_path: Path) -> None:
    setup = Setup("exact", "zstd", layers=1)
    await store_prefix(tmp_path, setup, 2 * SPAN_TOKENS)
    with StoreProcess(tmp_path) as store:
        extra = {"store": store.url, "mode": "read_only", "codec_threads": 1}
        point = in_a_fresh_process(setup, 2 * SPAN_TOKENS, extra)
    assert (point.quantiser, point.codec, point.tokens) == ("exact", "zstd", 2 * SPAN_TOKENS)
    assert point.raw_bytes == 2 * SPAN_TOKENS * 2 * 8 * 128 * 2
    assert 0 < point.compressed_bytes <= point.stored_bytes
    assert point.compressed_bytes < point.peak_bytes
    assert 1 << 20 < point.decoded_bytes < GOAL_BYTES


def test_what_is_reported() -> None:
    short = Point("exact", "hevc", 4096, 10, 5, 9 << 20, 4 << 20, 7 << 20, 1.0, 100)
    long = Point("exact", "hevc", 8192, 20, 10, 9 << 20, 4 << 20, 6 << 20, 2.0, 200)
    content = report([short, long], {"codec_threads": 2})
    assert content["largest_decoded_bytes"] == 7 << 20
    assert content["largest_decoded_bytes_of_longest"] == 6 << 20
    assert content["device_bytes"] < GOAL_BYTES
    assert content["config"] == {"codec_threads": 2}
    assert [point["tokens"] for point in content["points"]] == [4096, 8192]
