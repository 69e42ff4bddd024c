"""Segments whose coefficients are in levels: read as far as a reader likes, encrypted, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import msgspec
import pytest

from sgl_kvfetch.codec.bitstream.base import MOST_LEVELS
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import Manifest, coarsened, decode_manifest
from sgl_kvfetch.codec.container.objects import Level
from sgl_kvfetch.codec.container.protect import open_manifest, secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.layout.frames import FLAT, region_layout
from sgl_kvfetch.codec.quant.base import Quantised
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.types import KVGeometry
from tests.codec.container.plain import cells_of, same
from tests.codec.quant.profiles import make_profile, values_of
from tests.segments import make_heads, page_hashes

GEOMETRY = KVGeometry(5, 4, 16, 16, 8, "bfloat16")
LEVELS = 3
KLT = KltQuantiser(make_profile(num_layers=5, cell_heads=2, num_sinks=1), step=0.05)
SPEC = SegmentSpec(make_heads(GEOMETRY, KLT), KLT, "ans", FLAT, span_pages=2, num_levels=LEVELS)


def make(spec: SegmentSpec = SPEC, first_page: int = 0, num_pages: int = 4) -> CodedSegment:
    tokens = slice(first_page * 8, (first_page + num_pages) * 8)
    k, v = (x[tokens].bfloat16() for x in values_of(KLT.profile, 64))
    hashes = page_hashes(num_pages, "", first_page)
    previous = page_hashes(1, "", first_page - 1)[0] if first_page else None
    return encode_segment(spec, {"k": k, "v": v}, first_page, previous, hashes)


@cache
def segment() -> CodedSegment:
    return make()


def cells(found: CodedSegment, num_levels: int | None = None) -> list[Quantised]:
    return cells_of(found, KLT, num_levels=num_levels)


def changed(manifest: Manifest, *levels: Level) -> Manifest:
    return msgspec.structs.replace(manifest, variants=(msgspec.structs.replace(manifest.variants[0], levels=levels),))


def test_all_levels_have_what_one_has() -> None:
    at_once = make(replace(SPEC, num_levels=1))
    assert same(cells(segment()), cells(at_once))
    assert len(segment().manifest.levels) == LEVELS - 1
    assert set(segment().manifest.data_names) == {name for name, _ in segment().data_objects()}


def test_the_integers_of_each_prefix_have_a_checksum() -> None:
    manifest = segment().manifest
    first, last = manifest.levels
    rows = (first.chunks[0], *last.chunks[1:])
    wrong = msgspec.structs.replace(
        last, chunks=(msgspec.structs.replace(last.chunks[0], decoded_checksum=bytes(16)), *rows[1:])
    )
    reader = SegmentReader(changed(manifest, first, wrong), KLT, num_levels=LEVELS)
    cell = next(manifest.cells())
    with pytest.raises(CorruptError, match="decoded coefficients: checksum"):
        reader.decode_cell(cell, reader.chunks_in(cell, [segment().data, *segment().level_data]))


@pytest.mark.parametrize(("num_levels", "num_dropped"), [(LEVELS - 1, 0), (1, 0), (1, 1), (LEVELS, 1)])
def test_a_manifest_that_lacks_levels_and_does_not_say_so_is_refused(num_levels: int, num_dropped: int) -> None:
    """Its values would count as finer than they are."""
    (variant,) = segment().manifest.variants
    lying = msgspec.structs.replace(variant.with_levels(num_levels - 1), num_dropped=num_dropped)
    manifest = decode_manifest(msgspec.structs.replace(segment().manifest, variants=(lying,)).encode())
    named = num_levels + num_dropped
    for read in range(1, num_levels + 1):
        reader = SegmentReader(manifest, KLT, num_levels=read)
        data = reader.chunks_in(next(manifest.cells()), [segment().data, *segment().level_data][:read])
        with pytest.raises(CorruptError, match=f"ladder has {LEVELS} levels, expected the manifest's {named}"):
            reader.decode_cell(next(manifest.cells()), data)


KEYS = StoreKeys(bytes(32))
(KEY,) = KEYS.ids


@cache
def encrypted() -> CodedSegment:
    return secure_segment(segment(), KEYS)


def test_an_encrypted_level_decrypts_in_its_place_alone() -> None:
    first, last = encrypted().manifest.levels
    for levels in ((last, first), (last,), (first,)):  # the last would leave no trace
        with pytest.raises(CorruptError, match=f"does not decrypt with the key {KEY}"):
            open_manifest(changed(encrypted().manifest, *levels), KEYS)


def test_a_store_drops_levels_that_it_cannot_read() -> None:
    found = coarsened(encrypted().manifest, encrypted().manifest.encode())
    assert found is not None
    coarser = decode_manifest(found[0])
    assert coarser.num_droppable == LEVELS - 2
    assert open_manifest(coarser, KEYS).num_dropped == 1
    (variant,) = coarser.variants
    for num_dropped in (0, 2):  # which readers would hold against levels.max_kl
        lying = msgspec.structs.replace(variant, num_dropped=num_dropped)
        with pytest.raises(CorruptError, match="does not decrypt"):
            open_manifest(msgspec.structs.replace(coarser, variants=(lying,)), KEYS)


def test_levels_that_do_not_fit_are_refused() -> None:
    manifest = segment().manifest
    first, last = manifest.levels
    chunks = first.chunks
    other = msgspec.structs.replace(chunks[0], codec="ans")
    for levels, fault in (
        ((msgspec.structs.replace(first, chunks=chunks[:-1]), last), "chunks, expected"),
        ((msgspec.structs.replace(first, chunks=(other, *chunks[1:])),), "of digits"),
        ((first,) * 4, "length <= 3"),
    ):
        with pytest.raises(FormatError, match=fault):
            decode_manifest(changed(manifest, *levels).encode())
    (variant,) = manifest.variants
    dropped = msgspec.structs.replace(variant, num_dropped=MOST_LEVELS - LEVELS + 1)
    with pytest.raises(FormatError, match="5 levels with those that were dropped, more than 4"):
        decode_manifest(msgspec.structs.replace(manifest, variants=(dropped,)).encode())
    at_once = make(replace(SPEC, num_levels=1)).manifest
    with pytest.raises(FormatError, match="levels, but no chunk in the codec ladder"):
        decode_manifest(changed(at_once, first).encode())
    pictures = msgspec.structs.replace(variant, layouts={"coefficients": region_layout(200, 16, "240p")})
    with pytest.raises(FormatError, match="ladder in a layout that is not flat"):
        decode_manifest(msgspec.structs.replace(manifest, variants=(pictures,)).encode())
