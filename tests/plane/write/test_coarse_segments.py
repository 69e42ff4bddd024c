"""Segments that have lost levels are written again, whole, by servers that read no coarse values."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from harness.waiting import until_idle
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.pages import RawPages
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.plane.write.writer import Writer, commit_segment
from tests.codec.container.test_levels import GEOMETRY, KLT, LEVELS, SPEC, make
from tests.codec.quant.profiles import values_of
from tests.segments import page_hashes


def batch(num_pages: int) -> PageBatch:
    k, v = (x[: num_pages * GEOMETRY.page_size].bfloat16() for x in values_of(KLT.profile, 64))
    pages = RawPages(*(x.view(-1, GEOMETRY.page_size, *x.shape[1:]) for x in (k, v)))
    return PageBatch(0, None, page_hashes(num_pages), [pages])


@pytest.mark.parametrize("refines", [True, False])
@pytest.mark.parametrize(
    ("stored", "written", "are_levels_back"),
    [
        ([4], 4, True),
        ([2, 2], 4, True),
        ([4], 2, False),  # the last two pages would be lost
    ],
    ids=["the same", "halves", "a part"],
)
async def test_levels_come_back(
    tmp_path: Path, stored: list[int], written: int, are_levels_back: bool, refines: bool
) -> None:
    store = LocalStore(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        try:
            for index, num_pages in enumerate(stored):
                coded = make(SPEC, index * num_pages, num_pages)
                (variant,) = coded.manifest.variants
                lost = msgspec.structs.replace(coded.manifest, variants=(variant.with_levels(1),))
                await commit_segment(store, replace(coded, manifest=lost, level_data=coded.level_data[:1]))
            writer = Writer(
                store,
                SPEC,
                pool,
                max_segment_pages=4,
                queue_bytes=1 << 20,
                linger_s=0.01,
                retire_s=0.05,
                refines=refines,
            )
            pages = batch(written)
            writer.add(pages)
            await writer.drain()
            await until_idle()  # what is replaced is deleted
            hits = (await store.lookup(SPEC.heads.folder, page_hashes(written))).hits
            dropped = [decode_manifest(hit.manifest).variants[0].num_dropped for hit in hits]
            expected = [0] if refines and are_levels_back else [LEVELS - 2] * len(stored)
            assert dropped == expected
            names = [info.name async for info in store.list() if info.name.endswith(".kvm")]
            assert len(names) == len(expected)
            await writer.close()
        finally:
            await store.close()
