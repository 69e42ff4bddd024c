from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.bitstream.entropy import ZstdCodec
from sgl_kvfetch.codec.container import manifest as manifest_module
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.objects import SIDE_CHUNK_BYTES
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.sides import encode_side, side_places
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.types import SideKey
from tests.codec.container.plain import side_pages
from tests.golden.second_reader import names_of, parse_manifest, read_sides
from tests.segments import make_segment, with_side

LARGE = SIDE_CHUNK_BYTES + 1000  # bytes: two chunks


def random_bytes(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 4, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


PAGES: dict[SideKey, torch.Tensor] = {
    ("swa", 2): random_bytes(300, 0),
    ("swa", 3): random_bytes(300, 1),
    ("mamba", 3): random_bytes(LARGE, 2),
}


def with_sides(segment: CodedSegment, pages: dict[SideKey, torch.Tensor]) -> CodedSegment:
    return with_side(segment, *encode_side(pages))


def expected(pages: dict[SideKey, torch.Tensor]) -> dict[SideKey, bytes]:
    return {key: x.numpy().tobytes() for key, x in pages.items()}


def test_side_pages_come_back_as_they_were() -> None:
    """Also a page of an odd size, and pages that are added later; also by docs/format.md's reader."""
    odd = {("mamba", 0): states(4096)[:8191]}
    assert side_pages(with_sides(with_sides(make_segment()[0], PAGES), odd)) == expected(PAGES | odd)
    segment = with_sides(make_segment()[0], PAGES)
    raw = segment.manifest.encode()
    assert read_sides(raw, list(segment.side_data)) == side_pages(segment) == expected(PAGES)
    assert names_of(parse_manifest(raw))[1:] == [name for name, _ in segment.data_objects()]
    assert segment.manifest.data_names == {name for name, _ in segment.data_objects()}
    assert segment.manifest.raw_bytes - segment.manifest.kv_bytes == 600 + LARGE
    place = side_places(segment.manifest)["mamba", 3]
    assert len(place.page.chunks) == 2
    with pytest.raises(CorruptError, match=r"has 3 bytes, expected \d+"):
        place.decode(b"abc")


def states(size: int) -> torch.Tensor:
    """Values as keys of a window have them: channels differ in scale."""
    generator = torch.Generator().manual_seed(5)
    scales = torch.randn(128, generator=generator).exp()
    values = torch.randn((-(-size // 128), 128), generator=generator) * scales
    return values.bfloat16().view(-1)[:size].view(torch.uint8).contiguous()


@pytest.mark.parametrize("num_bytes", [2, 600, 64 * 1024, LARGE])
def test_values_of_bfloat16_are_coded_as_exact_codes_them(num_bytes: int) -> None:
    pages = {("swa", 0): states(num_bytes // 2), ("swa", 1): random_bytes(num_bytes, 1)}
    segment = with_sides(make_segment()[0], pages)
    assert side_pages(segment) == expected(pages)
    raw = segment.manifest.encode()
    if num_bytes < LARGE:  # the second reader takes a minute for more
        assert read_sides(raw, list(segment.side_data)) == side_pages(segment)
    size = side_places(segment.manifest)["swa", 0].size_bytes
    if num_bytes >= 64 * 1024:
        assert size < 0.71 * num_bytes
        assert size < 0.9 * len(ZstdCodec().compress(pages["swa", 0].numpy().tobytes()))
    assert side_places(segment.manifest)["swa", 1].page.chunks[-1].codec == "zstd"


def test_values_that_are_not_whole_are_refused() -> None:
    segment = with_sides(make_segment()[0], {("swa", 0): states(4096)})
    (side,) = segment.manifest.sides
    (page,) = side.pages
    assert page.chunks[0].codec == "bfloat16"
    for num_bytes in (8191, 1 << 20):
        other = msgspec.structs.replace(side, pages=(msgspec.structs.replace(page, num_bytes=num_bytes),))
        with pytest.raises(CorruptError, match=r"bfloat16 bitstream has|ans-tables|ans bitstream"):
            side_pages(replace(segment, manifest=msgspec.structs.replace(segment.manifest, sides=(other,))))


def test_malformed_side_pages_are_refused() -> None:
    segment = with_sides(make_segment()[0], PAGES)
    manifest = segment.manifest
    (side,) = manifest.sides
    first, *others = side.pages
    large = msgspec.structs.replace(first.chunks[0], size_bytes=2 * SIDE_CHUNK_BYTES + 1)
    for changes, message in (
        ({"page": 4}, "the segment has 4 pages"),
        ({"num_bytes": LARGE}, "bytes in 1 chunks"),
        ({"chunks": (large,)}, "a chunk of more than 8388608 bytes"),
        ({"num_bytes": 0}, "Expected `int` >= 1"),
        ({"pool": "mamba", "page": 3}, "a side page twice"),
        (None, "without side pages"),
    ):
        pages = () if changes is None else (msgspec.structs.replace(first, **changes), *others)
        sides = (msgspec.structs.replace(side, pages=pages),)
        with pytest.raises(FormatError, match=message):
            decode_manifest(msgspec.structs.replace(manifest, sides=sides).encode())
    for number in range(manifest_module.MAX_SIDES):
        segment = with_sides(segment, {(f"pool{number}", 0): random_bytes(8, number)})
    with pytest.raises(FormatError, match="length <= 64"):
        decode_manifest(segment.manifest.encode())


def test_a_large_side_page_is_verified_a_piece_at_a_time() -> None:
    """A few kilobytes decode to it."""
    segment = with_sides(make_segment()[0], {("mamba", 0): torch.zeros(64 << 20, dtype=torch.uint8)})
    (place,) = side_places(segment.manifest).values()
    (data,) = segment.side_data
    assert len(data) < 10_000
    tracemalloc.start()
    try:
        assert sum(map(len, place.decode_chunks(data))) == 64 << 20
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
