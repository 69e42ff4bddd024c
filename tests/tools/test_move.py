from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.small_segments import FOLDER, make_segment, page_hashes
from harness.store_process import StoreProcess
from sgl_kvfetch.directory.local import LocalStore
from tests.segments import put_all, using
from tests.tools.conftest import kvfetch, kvfetch_json

CHAIN = page_hashes(12)
SEGMENTS = [make_segment(CHAIN, first, 4) for first in (0, 4, 8)]


def contents(root: Path) -> dict[str, bytes | None]:
    async def read(store: LocalStore) -> dict[str, bytes | None]:
        return {info.name: await store.get(info.name) async for info in store.list()}

    return using(LocalStore(root), read)


def num_found(root: Path) -> int:
    return using(LocalStore(root), lambda store: store.lookup(FOLDER, CHAIN)).num_pages


@pytest.fixture
def source(tmp_path: Path) -> Path:
    put_all(LocalStore(tmp_path / "source"), *SEGMENTS)
    return tmp_path / "source"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.process
def test_to_a_server(source: Path, target: Path) -> None:
    before = contents(source)
    with StoreProcess(target) as store:
        result = kvfetch("move", str(source), store.url)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 segments moved, 0 of them were there already; ")
    assert (contents(source), contents(target)) == ({}, before)
    assert num_found(target) == 12


def test_to_a_small_store(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It evicts data whose manifest has not come yet, for the data of other segments. Alone, each fits."""
    evicted = {segment.data_name for segment in SEGMENTS}
    get = LocalStore.get

    async def get_after_eviction(
        self: LocalStore, name: str, start: int = 0, length: int | None = None
    ) -> bytes | None:
        if self.root == target and name in evicted:
            evicted.remove(name)
            await self.delete(name)
        return await get(self, name, start, length)

    monkeypatch.setattr(LocalStore, "get", get_after_eviction)
    result = kvfetch("move", str(source), str(target))
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 segments moved")
    assert (contents(source), num_found(target)) == ({}, 12)


@pytest.mark.parametrize("options", [(), ("--copy",)])
def test_what_the_target_has_evicted_in_the_end_is_not_moved(
    source: Path, target: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache makes room for what comes by deleting what came."""
    before, put = contents(source), LocalStore.put
    manifests = [segment.manifest.key.manifest_name for segment in SEGMENTS]

    async def put_and_evict(self: LocalStore, name: str, data: bytes) -> None:
        await put(self, name, data)
        there = [each for each in manifests if await self.head(each) is not None]
        if self.root == target and len(there) > 1:
            await self.delete(next(each for each in there if each != name))

    monkeypatch.setattr(LocalStore, "put", put_and_evict)
    result = kvfetch("move", str(source), str(target), *options)
    monkeypatch.undo()
    assert result.exit_code == 1
    (left,) = {name for name in contents(target) if name in manifests}
    assert f"1 segments {'copied' if options else 'moved'}, 0 of them" in result.stdout
    for name in manifests:
        assert (f"FAILED {name}: the target has evicted it" in result.stdout) == (name != left)
    gone = {name for name in before if name.startswith(left.removesuffix(".kvm"))}
    assert contents(source) == {name: content for name, content in before.items() if options or name not in gone}


def test_a_copy_of_a_part(source: Path, target: Path) -> None:
    before = contents(source)
    part = f"{source}#{SEGMENTS[1].manifest.key.stem}"
    assert kvfetch("move", part, str(target), "--copy").exit_code == 0
    assert contents(source) == before
    assert contents(target) == {
        name: content for name, content in before.items() if SEGMENTS[1].manifest.key.stem in name
    }


def test_after_an_interruption_it_goes_on(source: Path, target: Path) -> None:
    before = contents(source)
    kvfetch("move", f"{source}#{SEGMENTS[0].manifest.key.stem}", str(target), "--copy")
    result = kvfetch_json("move", str(source), str(target))
    assert (result["num_moved"], result["num_there"], result["failures"]) == (3, 1, {})
    assert (contents(source), contents(target)) == ({}, before)


def damage(path: Path) -> None:
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1] + b"?")


DATA, MANIFEST = SEGMENTS[1].data_name, SEGMENTS[1].manifest.key.manifest_name


@pytest.mark.parametrize(("name", "harm"), [(DATA, Path.unlink), (DATA, damage), (MANIFEST, damage)])
def test_a_segment_that_is_not_whole_stays(
    source: Path, target: Path, name: str, harm: Callable[[Path], object]
) -> None:
    harm(source / name)
    result = kvfetch("move", str(source), str(target))
    assert result.exit_code == 1
    assert f"FAILED {SEGMENTS[1].manifest.key.manifest_name}: " in result.stdout
    assert {name for name in contents(source) if name.endswith(".kvm")} == {SEGMENTS[1].manifest.key.manifest_name}
    assert num_found(target) == 4


def test_nothing_is_deleted_that_did_not_come_back(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(source)

    async def put(self: LocalStore, name: str, data: bytes) -> None:
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data[:-1] + b"?")

    monkeypatch.setattr(LocalStore, "put", put)
    result = kvfetch("move", str(source), str(target))
    assert result.exit_code == 1
    assert "came back from the target with other bytes" in result.stdout
    assert contents(source) == before


def test_a_damaged_copy_at_the_target_is_written_again(source: Path, target: Path) -> None:
    before = contents(source)
    kvfetch("move", str(source), str(target), "--copy")
    damage(target / SEGMENTS[1].data_name)
    result = kvfetch_json("move", str(source), str(target))
    assert (result["num_moved"], result["num_there"]) == (3, 2)
    assert (contents(source), contents(target)) == ({}, before)


@pytest.mark.process
@pytest.mark.parametrize("name", ["{}/", "file://{}", "{}-link", "http://localhost:{port}"])
def test_the_same_store_under_another_name(source: Path, name: str) -> None:
    before = contents(source)
    Path(f"{source}-link").symlink_to(source)
    if name.startswith("http:"):
        with StoreProcess(source) as store:
            result = kvfetch("move", store.url, name.format(port=store.port))
    else:
        result = kvfetch("move", str(source), name.format(source))
    assert result.exit_code == 2
    assert "the same store" in result.stderr
    assert contents(source) == before


def test_the_segments_of_a_model(source: Path, target: Path) -> None:
    before = contents(source)
    put_all(LocalStore(source), make_segment(CHAIN, 0, 4, model="another"))
    both = contents(source)
    assert kvfetch("move", str(source), str(target), "--model", "another").exit_code == 0
    assert contents(source) == before
    assert contents(target) == {name: content for name, content in both.items() if name not in before}


def test_a_dry_run_writes_and_deletes_nothing(source: Path, target: Path) -> None:
    kvfetch("move", f"{source}#{SEGMENTS[0].manifest.key.stem}", str(target), "--copy")
    before = contents(source), contents(target)
    result = kvfetch("move", str(source), str(target), "--dry-run")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("3 segments would be moved, 1 of them are there already; ")
    assert (contents(source), contents(target)) == before
