import random
import shlex
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch

from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.sides import encode_side
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.upkeep import list_segments
from sgl_kvfetch.tools.verify import Report, Verifier
from tests.segments import as_newer, make_segment, using, with_side
from tests.tools.conftest import KEYS, Stored, flip, kvfetch, kvfetch_json, put, unchanged


def verify_json(target: str, exit_code: int, *args: str) -> Any:
    return kvfetch_json("verify", target, *args, exit_code=exit_code)


class Watched(LocalStore):
    """Has each read looked at."""

    before_get: Callable[[], None] | None = None
    largest = 0

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if self.before_get is not None:
            self.before_get()
        data = await super().get(name, start, length)
        self.largest = max(self.largest, len(data or b""))
        return data


def run_verifier(store: LocalStore, read_bytes: int = 4 << 20) -> Report:
    async def run(store: LocalStore) -> Report:
        with ThreadPoolExecutor(1) as pool:
            verifier = Verifier(store, pool, jobs=2, read_bytes=read_bytes)
            return await verifier.run(await list_segments(store, ""))

    return using(store, run)


def with_chunk(segment: CodedSegment, **changes: Any) -> bytes:
    """Return the manifest, whose own checksum holds, with the second chunk's row changed."""
    (variant,) = segment.manifest.variants
    chunks = list(variant.chunks)
    chunks[1] = msgspec.structs.replace(chunks[1], **changes)
    changed = msgspec.structs.replace(variant, chunks=tuple(chunks))
    return msgspec.structs.replace(segment.manifest, variants=(changed,)).encode()


def test_a_sound_store_and_an_empty_one(stored: Stored, tmp_path: Path) -> None:
    with unchanged(stored.root):
        report = verify_json(stored.url, 0)
    assert report["num_segments"] == 3
    assert report["num_chunks"] == sum(len(s.manifest.variants[0].chunks) for s in stored.segments)
    assert report["read_bytes"] == sum(p.stat().st_size for p in stored.root.rglob("*.kv?"))
    assert report["problems"] == report["orphans"] == []
    assert "all is well" in kvfetch("verify", str(stored.root)).stdout
    (empty := tmp_path / "empty").mkdir()
    assert kvfetch("verify", str(empty)).stdout == "0 segments, 0 chunks, 0 B read: there was nothing to verify\n"


@pytest.mark.process
def test_a_manifest_above_the_formats_limit_is_named_over_http_too(stored: Stored) -> None:
    """Lookups skip it, and its size is all that a client learns."""
    with stored.manifest_path(1).open("ab") as file:
        file.truncate(2 << 20)
    with StoreProcess(stored.root) as served:
        over_http = verify_json(served.url, 1)
    for report in (over_http, verify_json(stored.url, 1)):
        (problem,) = report["problems"]
        assert problem["name"] == stored.segments[1].manifest.key.manifest_name
        assert f"has {2 << 20} bytes" in problem["what"]
        assert report["num_segments"] == 2


def test_any_flipped_byte_is_found(stored: Stored) -> None:
    rng = random.Random(3)
    for _ in range(12):
        index = rng.randrange(3)
        path = rng.choice([stored.data_path(index), stored.manifest_path(index)])
        place = rng.randrange(path.stat().st_size)
        flip(path, place)
        (problem,) = {p["name"] for p in verify_json(stored.url, 1)["problems"]}
        assert problem == str(path.relative_to(stored.root))
        flip(path, place)
    verify_json(stored.url, 0)


def test_what_is_corrupt_is_named_and_can_be_deleted_by_the_commands_that_are_printed(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flip(stored.data_path(0), -1)
    flip(stored.manifest_path(2), 40)
    output = kvfetch("verify", stored.root.name).stdout
    (cell, digest) = [
        line for line in output.splitlines() if line.startswith(f"CORRUPT {stored.segments[0].data_name}")
    ]
    assert "span=1, layer_group=1, head_block=0" in cell
    assert "compressed bytes: checksum does not match" in cell
    assert "digest" in digest
    assert "2 objects corrupt" in output
    verify_json(f"{stored.url}#{stored.segments[1].manifest.key.stem}", 0)
    commands = [shlex.split(line) for line in output.splitlines() if line.startswith("  kvfetch ")]
    assert [command[:2] for command in commands] == [["kvfetch", "clear"]] * 2
    for _, *args in commands:
        assert "2 objects deleted" in kvfetch(*args, "--yes").output
    assert "1 segments" in (after := kvfetch("verify", stored.root.name).stdout)
    assert "all is well" in after


def test_orphans_are_counted_and_no_fault(stored: Stored) -> None:
    stored.manifest_path(1).unlink()
    # Also data that the manifest beside it does not name: a segment that was replaced.
    name = stored.segments[0].manifest.key.data_name("0" * 32)
    (stored.root / name).write_bytes(b"old")
    report = verify_json(stored.url, 0)
    assert {info["name"] for info in report["orphans"]} == {name, stored.segments[1].data_name}


@pytest.mark.parametrize(
    ("suffix", "change", "named", "what"),
    [
        ("kvd", lambda segment, _: segment.data[:-7], "kvd", "has {less} bytes, expected {size}"),
        ("kvd", lambda segment, _: segment.data + bytes(7), "kvd", "has {more} bytes, expected {size}"),
        ("kvd", None, "kvd", "missing, though its manifest names it"),
        # The compressed bytes are as written, and the codec gives back other integers than the writer had.
        ("kvm", lambda segment, _: with_chunk(segment, decoded_checksum=bytes(16)), "kvd", "decoded k: checksum does"),
        ("kvm", lambda segment, _: with_chunk(segment, codec="av2"), "kvm", "codec 'av2' is unknown"),
        (
            "kvm",
            lambda segment, _: as_newer(segment.manifest.encode(), later=b"\x91" * 100_000 + b"\xc0"),
            "kvm",
            "malformed",
        ),
        ("kvm", lambda _, other: other.manifest.encode(), "kvm", "belongs under the name"),
    ],
)
def test_each_kind_of_damage_is_one_problem(
    stored: Stored, suffix: str, change: Callable[..., bytes] | None, named: str, what: str
) -> None:
    paths, size = {"kvd": stored.data_path(2), "kvm": stored.manifest_path(2)}, len(stored.segments[2].data)
    if change is None:
        paths[suffix].unlink()
    else:
        paths[suffix].write_bytes(change(stored.segments[2], stored.segments[0]))
    (problem,) = verify_json(stored.url, 1)["problems"]
    assert problem["name"] == str(paths[named].relative_to(stored.root))
    assert what.format(size=size, less=size - 7, more=size + 7) in problem["what"]


def test_encrypted_segments_are_decoded_with_the_key(
    tmp_path: Path, coded: tuple[CodedSegment, ...], key_file: Path
) -> None:
    stored = Stored(tmp_path / "store", tuple(secure_segment(each, KEYS) for each in coded))
    for segment in stored.segments:
        put(stored.root, segment)
    report = verify_json(stored.url, 0, "--key-file", str(key_file))
    assert (report["num_segments"], report["num_locked"]) == (3, 0)
    # Without the key, only the bytes as they are stored.
    report = verify_json(stored.url, 0)
    assert (report["num_segments"], report["num_locked"], report["locking_keys"]) == (3, 3, KEYS.ids)
    assert f"encrypted with {KEYS.ids[0]} (not decoded" in kvfetch("verify", stored.url).stdout
    flip(stored.data_path(0), 5)
    problems = verify_json(stored.url, 1)["problems"]
    assert {problem["name"] for problem in problems} == {stored.segments[0].data_name}
    assert "do not match the digest" in problems[0]["what"]
    flip(stored.data_path(0), 5)
    put(stored.root, coded[0])
    problems = verify_json(stored.url, 1, "--key-file", str(key_file))["problems"]
    assert problems == [{"name": coded[0].manifest.key.manifest_name, "what": "is not encrypted"}]


def test_each_side_page_is_verified(tmp_path: Path) -> None:
    pages = {(f"pool{n}", page): torch.full((3000,), n, dtype=torch.uint8) for n in range(9) for page in range(4)}
    segment = with_side(make_segment()[0], *encode_side(pages))
    put(tmp_path, segment)
    report = run_verifier(LocalStore(tmp_path))
    assert report.problems == []
    assert report.num_chunks == len(segment.manifest.variants[0].chunks) + 36
    (side,) = segment.manifest.sides
    flip(tmp_path / segment.manifest.data_name(side), side.pages[0].size_bytes + 3)
    for read_bytes in (100, 4 << 20):
        assert [problem.what for problem in run_verifier(LocalStore(tmp_path), read_bytes).problems] == [
            "side page 1 of pool0, compressed bytes: checksum does not match",
            "its bytes do not match the digest in its name",
        ]


def test_a_segment_that_is_evicted_meanwhile_is_no_fault(stored: Stored) -> None:
    store = Watched(stored.root)

    def evict() -> None:
        for path in (stored.manifest_path(0), stored.data_path(0)):
            path.unlink(missing_ok=True)

    store.before_get = evict  # after the listing
    report = run_verifier(store)
    assert (report.problems, report.num_gone, report.num_segments) == ([], 1, 2)


def test_a_store_that_stops_answering_is_not_a_corrupt_one(stored: Stored) -> None:
    store = Watched(stored.root)
    store.before_get = Mock(side_effect=StoreError("refused", "connection refused"))
    with pytest.raises(StoreError, match="refused"):
        run_verifier(store)


def test_large_segments_are_read_piece_by_piece(stored: Stored) -> None:
    put(stored.root, make_segment(num_pages=64, span_pages=64)[0])
    store = Watched(stored.root)
    assert run_verifier(store, read_bytes=300_000).problems == []
    assert 150_000 < store.largest <= 300_000
