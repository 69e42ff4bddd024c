"""Servers of different targets that share a namespace, because all levels together are the same for both."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.config import KVFetchConfig, config_quantiser
from sgl_kvfetch.plane.store import StoreClient, open_client
from tests.codec.container.test_levels import GEOMETRY, KLT
from tests.plane.write.test_coarse_segments import batch
from tests.segments import make_heads, page_hashes

FINE_KL, COARSE_KL = 2e-5, 2e-4  # by the profile's curve, steps 3 and 9 times as large cost 1.5e-4 and 5.9e-3
HASHES = page_hashes(4)
FINE, COARSE = {"target_kl": FINE_KL}, {"target_kl": COARSE_KL, "levels": {"finest_kl": FINE_KL}}

Open = Callable[..., StoreClient]


def config_of(folder: Path, **keys: Any) -> KVFetchConfig:
    if not (profile := folder / "profile").exists():
        KLT.profile.save(profile)
    levels = {"count": 3, **keys.pop("levels", {})}
    return KVFetchConfig.model_validate(
        {"store": (folder / "store").as_uri(), "profile": str(profile), "levels": levels, **keys}
    )


@pytest.fixture
async def open_server(tmp_path: Path) -> AsyncIterator[Open]:
    async with AsyncExitStack() as opened:

        def open_server(**keys: Any) -> StoreClient:
            config = config_of(tmp_path, **keys)
            quantiser = config_quantiser(config)
            client = open_client(config, make_heads(GEOMETRY, quantiser), quantiser)
            opened.push_async_callback(client.close, WAIT_S)
            return client

        yield open_server


async def write(client: StoreClient) -> None:
    pages = batch(len(HASHES))
    client.writer.add(pages)
    await client.writer.drain()


async def left_out(client: StoreClient) -> list[int]:
    """Return how many levels are not read of each page that is found."""
    client.finder.forget_pages()
    return [page.reader.levels_left_out for page in await client.finder.find_pages(HASHES, WAIT_S)]


async def test_a_coarser_server_reads_the_levels_that_it_needs(open_server: Open) -> None:
    in_time = COARSE | {"levels": {"finest_kl": FINE_KL, "max_kl": 6e-3}}
    fine, coarse, hurried = (open_server(**keys) for keys in (FINE, COARSE, in_time))
    await write(fine)
    assert await left_out(fine) == [0] * 4
    assert await left_out(coarse) == [1] * 4
    assert await left_out(hurried) == [1] * 4
    assert hurried.fetcher.levels.most_left_out == 2


async def test_a_coarser_server_writes_the_levels_that_it_needs_and_a_finer_one_adds_the_rest(
    open_server: Open,
) -> None:
    fine, coarse, tolerant = (open_server(**keys) for keys in (FINE, COARSE, FINE | {"levels": {"max_kl": COARSE_KL}}))
    await write(coarse)
    assert await left_out(coarse) == await left_out(tolerant) == [1] * 4
    assert await left_out(fine) == []
    (hit,) = (await fine.store.lookup(make_heads(GEOMETRY, KltQuantiser(KLT.profile, FINE_KL)).folder, HASHES)).hits
    (variant,) = decode_manifest(hit.manifest).variants
    assert (len(variant.levels), variant.num_dropped) == (1, 1)
    await write(tolerant)  # which may have computed from coarse values
    assert await left_out(fine) == []
    await write(fine)
    assert await left_out(fine) == [0] * 4


def test_without_it_each_target_has_a_namespace(tmp_path: Path) -> None:
    names = [
        config_quantiser(config_of(tmp_path, **keys)).identity for keys in (FINE, COARSE, {"target_kl": COARSE_KL})
    ]
    assert names[0] == names[1] != names[2]


@pytest.mark.parametrize("target_kl", [1e-4, 2e-5])
async def test_a_target_that_needs_all_levels_is_refused(open_server: Open, target_kl: float) -> None:
    with pytest.raises(ConfigError, match=r"target_kl = \S+ is below 0.00015, the cost of leaving out one level"):
        open_server(**COARSE | {"target_kl": target_kl})
