from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from harness.slow_link import SlowLink
from harness.small_segments import FOLDER, data_object, make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.stores.http import HttpStore

BYTES_PER_S = 12_500_000  # of a link of 0.1 Gbps


async def seconds_for(link: SlowLink, num_bytes: int, streams: int = 1) -> float:
    async def send() -> None:
        for i in range(num_bytes // streams // link.piece_bytes):
            await link.take(link.piece_bytes, continuing=i > 0)

    started = time.monotonic()
    await asyncio.gather(*(send() for _ in range(streams)))
    return time.monotonic() - started


@pytest.mark.parametrize("streams", [1, 4])
async def test_streams_together_are_never_faster_than_the_link(streams: int) -> None:
    assert await seconds_for(SlowLink(0.1), 2_500_000, streams) > 0.7 * 2_500_000 / BYTES_PER_S


async def test_an_idle_link_earns_no_credit() -> None:
    link = SlowLink(0.1)
    await seconds_for(link, 1_250_000)
    await asyncio.sleep(0.3)
    assert await seconds_for(link, 1_250_000) > 0.4 * 1_250_000 / BYTES_PER_S


async def test_link_speed_changes_every_second() -> None:
    link = SlowLink(0.008, 0.0, 0.004)  # 1 MB a second, nothing, half a MB a second
    assert link._sent_at(100.0, 500_000) == pytest.approx(100.5)
    assert link._sent_at(100.5, 500_000) == pytest.approx(101.0)
    assert link._sent_at(101.0, 250_000) == pytest.approx(102.5)
    assert link._sent_at(100.5, 1_500_000) == pytest.approx(103.5)


async def test_a_store_sends_reads_and_lookups_at_the_links_speed(tmp_path: Path) -> None:
    content = bytes(2_000_000)
    segment = make_segment(page_hashes(4), 0, 4)
    with StoreProcess(tmp_path, link_gbps=[0.05, 0.1]) as process:
        store = HttpStore(process.url)
        await store.put(data_object(content), content)
        started = time.monotonic()
        assert await store.get(data_object(content)) == content
        assert time.monotonic() - started > 0.8 * len(content) / BYTES_PER_S
        await put_segment(store, segment)
        assert (await store.lookup(FOLDER, page_hashes(4))).num_pages == 4
        await store.close()
    with StoreProcess(tmp_path, link_gbps=[0.00001]) as process:  # 1,250 bytes a second
        store = HttpStore(process.url)
        started = time.monotonic()
        assert (await store.lookup(FOLDER, page_hashes(4))).num_pages == 4
        assert time.monotonic() - started > 0.8 * len(segment.manifest.encode()) / 1250
        await store.close()
