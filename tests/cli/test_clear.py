from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness.small_segments import head_slice, make_segment, page_hashes, put_segment
from sgl_kvfetch.stores.local import LocalStore
from tests.cli.conftest import kvfetch, unchanged

CHAIN = page_hashes(4)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory with a segment of each of two models."""

    async def fill() -> None:
        store = LocalStore(tmp_path)
        for model in ("a", "b"):
            await put_segment(store, make_segment(CHAIN, 0, 4, model=model))
        await store.close()

    asyncio.run(fill())
    return tmp_path


def names(root: Path) -> set[str]:
    async def listed() -> set[str]:
        store = LocalStore(root)
        found = {info.name.partition("/")[0] async for info in store.list()}
        await store.close()
        return found

    return asyncio.run(listed())


def test_everything(store: Path) -> None:
    result = kvfetch("clear", str(store), "--yes")
    assert result.exit_code == 0, result.output
    assert "2 segments, " in result.output
    assert "4 objects deleted" in result.output
    assert names(store) == set()


def test_a_part(store: Path) -> None:
    folder = head_slice("a").folder
    assert "1 segments, " in kvfetch("clear", f"{store}#{folder}", "--yes").output
    assert names(store) == {head_slice("b").folder}


def test_nothing_without_an_answer(store: Path) -> None:
    with unchanged(store):
        result = kvfetch("clear", str(store))
    assert result.exit_code == 2
    assert "add --yes" in result.stderr
