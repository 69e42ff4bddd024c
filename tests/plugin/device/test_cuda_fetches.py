"""Tests of the GPU path on the CPU: whole fetches."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from harness.fetching import fetch_pages
from harness.waiting import until
from sgl_kvfetch.codec.bitstream.base import Decoders
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.plane.adapt.pool import DecodePool
from sgl_kvfetch.plane.fetch.fetcher import Fetcher
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.restore import working_bytes
from sgl_kvfetch.plane.fetch.sink import GuardedSink, IsFinished
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from tests.plugin.device.cuda_pages import NUM_PAGES, PLACES, Segment, holds, make_pages, slots_of
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("reference")]


async def stored(segment: Segment, folder: Path) -> tuple[LocalStore, SegmentReader]:
    coded, _ = segment
    store = LocalStore(folder)
    await store.put(coded.data_name, coded.data)
    return store, SegmentReader(coded.manifest, make_quantiser("exact"))


async def test_a_fetch_from_end_to_end(exact: Segment, tmp_path: Path) -> None:
    """Decode threads and the device run at the same time."""
    store, reader = await stored(exact, tmp_path)
    device = FakeDevice()
    pages = make_pages(device)
    with closing(DecodePool[Decoders]([{}] * 2)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=2000, inflight_bytes=10_000, may_delete=True)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        opened = pages.open_round(slots_of(PLACES))
        result = await fetch_pages(fetcher, sources, range(NUM_PAGES), GuardedSink(opened), 20)
    await store.close()
    assert (result.num_pages, result.failures) == (NUM_PAGES, ())
    opened.publish()
    seen: list[bool] = []
    device.forward_pass(lambda: seen.append(holds(pages, exact, PLACES)))
    device.run()
    assert seen == [True]


async def test_decoded_frames_are_bounded_until_the_device_has_finished_with_them(
    exact: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, reader = await stored(exact, tmp_path)
    device = FakeDevice()
    prefill_is_over = FakeEvent(device)
    device.forward.wait_event(prefill_is_over)
    opened = make_pages(device).open_round(slots_of(PLACES))
    handed: list[Future[IsFinished]] = []
    restore = CudaPages.restore

    def noted(*arguments: Any) -> Future[IsFinished]:
        handed.append(restore(*arguments))
        return handed[-1]

    monkeypatch.setattr(CudaPages, "restore", noted)
    size = max(working_bytes(reader, cell, opened) for cell in reader.manifest.cells())
    with closing(DecodePool[Decoders]([{}] * 2)) as pool:
        fetcher = Fetcher(store, pool, read_bytes=2000, inflight_bytes=10_000, may_delete=True, decode_bytes=2 * size)
        sources = [PageSource(reader, page) for page in range(NUM_PAGES)]
        fetch = asyncio.create_task(fetch_pages(fetcher, sources, range(NUM_PAGES), GuardedSink(opened), 20))
        await until(lambda: fetch.done() or (len(handed) >= 2 and bool(fetcher._decode_budget._waiting)))
        assert not fetch.done()
        assert len(handed) < 4
        prefill_is_over.is_done = True

        def is_over() -> bool:
            device.run()
            return fetch.done()

        await until(is_over)
        assert (await fetch).num_pages == NUM_PAGES
    await store.close()
    assert len(handed) == 4
    device.run()
    assert holds(opened, exact, PLACES)
