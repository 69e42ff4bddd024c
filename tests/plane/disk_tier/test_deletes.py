"""The disk tier: deleting and closing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.waiting import until
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane.disk_tier import DiskTier
from sgl_kvfetch.testing import FOLDER, put_segment
from tests.plane.disk_tier.tiers import CHAIN, MANIFEST_NAME, PIECE, SEGMENT, Events, RemoteStore, content, fill, read


@pytest.mark.parametrize("is_prefix", [False, True])
async def test_deletes_go_to_both(
    is_prefix: bool, tier: DiskTier, remote: RemoteStore, events: Events, tmp_path: Path
) -> None:
    await fill(tier, events)
    if is_prefix:
        assert await tier.delete_prefix(FOLDER) == 2
    else:
        assert await tier.delete(MANIFEST_NAME)
        assert await tier.delete(SEGMENT.data_name)
    for directory in ("remote", "disk"):
        assert not list((tmp_path / directory / FOLDER).iterdir())
    # Those of the disk go even if the store does not answer.
    await put_segment(remote, SEGMENT)
    await fill(tier, events)

    async def refuse(name: str) -> int:
        raise StoreError("refused", "as told")

    remote.delete_prefix = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(StoreError, match="as told"):
        await tier.delete_prefix(FOLDER)
    await until(lambda: not list((tmp_path / "disk" / FOLDER).iterdir()))


async def test_what_is_cleared_while_it_is_filled_is_not_kept(tier: DiskTier, events: Events, on_disk: Path) -> None:
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    await tier.delete_prefix(FOLDER)
    await until(lambda: events.fills["dropped"] == 1)
    assert content(on_disk) is None


async def test_closing_ends_fills(tier: DiskTier, events: Events, tmp_path: Path) -> None:
    await tier.lookup(FOLDER, CHAIN)
    await read(tier, end=2 * PIECE)
    folder = tmp_path / "disk" / FOLDER
    await until(lambda: folder.is_dir() and bool(list(folder.iterdir())))
    await tier.close()
    assert events.fills == {"dropped": 1}
    assert not os.listdir(folder)
