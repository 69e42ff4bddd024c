"""Levels in a store that may not see what it holds: over a real store, which drops some of them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path

import msgspec
import pytest

from harness.store_process import StoreProcess
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.plane.fetch.fetcher import FetchResult
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.plane.fetch.pool import DecodePool
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.keyed import KeyedStore
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.codec.container.test_levels import KLT, LEVELS, SPEC, segment
from tests.directory.test_dropped_levels import chain
from tests.fetchers import make_fetcher
from tests.plane.fetch.test_levels import fetched, same, values_at

pytestmark = pytest.mark.process

KEYS = StoreKeys(bytes(32))
ROOM = 12  # segments that the store has room for, with all levels


@cache
def video() -> CodedSegment:
    return transcode(segment().manifest, segment().data, make_targets(["hevc"], ["240p"]), levels=segment().level_data)


def with_video(number: int) -> CodedSegment:
    whole = chain(number)
    variants = *whole.manifest.variants, *video().manifest.variants
    manifest = msgspec.structs.replace(whole.manifest, variants=variants)
    return replace(whole, manifest=manifest, more_data=(video().data,))


async def manifests(store: Store) -> list[Manifest | None]:
    lookups = [await store.lookup(SPEC.heads.folder, chain(number).manifest.page_hashes) for number in range(ROOM + 1)]
    return [decode_manifest(found.hits[0].manifest) if found.hits else None for found in lookups]


async def test_a_store_drops_levels_that_it_cannot_read(tmp_path: Path) -> None:
    stored = secure_segment(with_video(0), KEYS)
    whole = len(stored.manifest.encode()) + sum(len(data) for _, data in stored.data_objects())
    options = "--capacity", f"{ROOM * whole}B", "--drop-levels", "1"
    with StoreProcess(tmp_path, extra_args=options) as served, closing(DecodePool[Decoders]([{}])) as pool:
        store = KeyedStore(HttpStore(served.url), KEYS)
        for number in range(ROOM + 1):
            await commit_segment(store, with_video(number))
        found = await manifests(store)
        lost = [None if each is None else each.num_dropped for each in found]
        assert {0, 1} <= set(lost)
        for num_lost in (0, 1):
            manifest = found[lost.index(num_lost)]
            assert manifest is not None
            assert manifest.is_encrypted
            # A variant that a dropped level does not make coarser would hold finer values than the others.
            assert len(manifest.variants) == 1 + (not num_lost)
            finder = PageFinder(store, SPEC.heads, KLT, print, tolerance=Tolerance(1))
            sources = await finder.find_pages(list(manifest.page_hashes), WAIT_S)
            result, values = await fetched(make_fetcher(store, pool), sources)
            assert result == FetchResult(4)
            assert same(values, values_at(segment(), LEVELS - num_lost))
        await store.close()
        strangers = KeyedStore(HttpStore(served.url), StoreKeys(b"x" * 32))
        assert set(await manifests(strangers)) == {None}
        await strangers.close()
