from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from harness.small_segments import data_object
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.server.throttle import Link
from sgl_kvfetch.stores.http import HttpStore


async def seconds_for(link: Link, num_bytes: int, streams: int = 1) -> float:
    async def send() -> None:
        for i in range(num_bytes // streams // link.piece_bytes):
            await link.take(link.piece_bytes, continuing=i > 0)

    started = time.monotonic()
    await asyncio.gather(*(send() for _ in range(streams)))
    return time.monotonic() - started


async def test_half_the_speed_takes_twice_the_time() -> None:
    slow, fast = await seconds_for(Link(0.1), 2_500_000), await seconds_for(Link(0.2), 2_500_000)
    assert 1.6 < slow / fast < 2.4


async def test_streams_share_the_link() -> None:
    one, four = await seconds_for(Link(0.1), 2_500_000), await seconds_for(Link(0.1), 2_500_000, streams=4)
    assert 0.7 < one / four < 1.4


async def test_an_idle_link_earns_no_credit() -> None:
    link = Link(0.1)
    busy = await seconds_for(link, 1_250_000)
    await asyncio.sleep(0.3)
    assert await seconds_for(link, 1_250_000) > 0.7 * busy


async def test_responses_are_limited_to_link_gbps(tmp_path: Path) -> None:
    content = bytes(2_000_000)
    took = []
    for gbps in (0.05, 0.1):
        async with running_server(ServerConfig(tmp_path, port=0, link_gbps=gbps)) as server:
            store = HttpStore(server.url)
            await store.put(data_object(content), content)
            started = time.monotonic()
            assert await store.get(data_object(content)) == content
            took.append(time.monotonic() - started)
            await store.close()
    assert took[1] > 0.8 * len(content) * 8 / 0.1e9  # never faster than the link
    assert 1.5 < took[0] / took[1] < 2.6


async def test_link_speed_changes_every_second() -> None:
    link = Link(0.008, 0.0, 0.004)  # 1 MB a second, nothing, half a MB a second
    assert link._sent_at(100.0, 500_000) == pytest.approx(100.5)
    assert link._sent_at(100.5, 500_000) == pytest.approx(101.0)
    assert link._sent_at(101.0, 250_000) == pytest.approx(102.5)
    assert link._sent_at(100.5, 1_500_000) == pytest.approx(103.5)


def test_a_link_that_never_sends_is_refused() -> None:
    with pytest.raises(ConfigError, match="not always 0"):
        ServerConfig(Path("store"), link_gbps=(0.0, 0.0))
