"""What the store's page reads: over HTTP, without a browser."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from math import inf
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from harness.small_segments import NAMESPACE, make_segment, page_hashes
from sgl_kvfetch import __version__
from sgl_kvfetch.codec import secure_segment
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.server import web as pages
from sgl_kvfetch.server.metrics import AnswerTimes, ServerMetrics
from sgl_kvfetch.status import Audits
from sgl_kvfetch.stores import NoteKind, wire
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.notes import seal_profile
from tests.segments import with_labels
from tests.server.serving import get, serving
from tests.stores.test_profiles import KEYS, save

pytestmark = pytest.mark.process


def test_a_namespace_says_how_its_cache_is_stored() -> None:
    """So that those that differ look different."""
    flags = "dtype=float32;quantization=awq;flags=0123456789ab"
    namespace = replace(NAMESPACE, kv_dtype="float8_e4m3fn", page_size=2, first_layer=1, model_dtype=flags)
    said = "float8_e4m3fn, pages of 2, layers 1, dtype float32, quantization awq, flags 0123456789ab"
    assert pages._cache(namespace) == said


async def test_the_page_itself_needs_no_token(tmp_path: Path) -> None:
    kinds = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
    async with serving(tmp_path, token="secret") as (_, session):
        for path in wire.PAGE_PATHS:
            async with session.get(path) as answer:
                assert (answer.status, answer.content_type) == (200, kinds[Path(path).suffix])
                policy, size = answer.headers["Content-Security-Policy"], len(await answer.read())
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            async with session.head(path) as answer:
                assert (answer.status, answer.content_length, await answer.read()) == (200, size, b"")
        async with session.get(wire.Route.SUMMARY, headers={"Authorization": "Bearer secret"}) as answer:
            counted = (await answer.json())["history"][-1]["values"]
    assert not [name for name in counted if name.startswith("requests_total")]


async def test_what_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SUMMARY_AGE_S", 600.0)
    both = make_segment(page_hashes(8), 0, 8), make_segment(page_hashes(3, "other"), 0, 2)
    long, short = (with_labels(segment, Labels("org/llama", "klt 6.5e-4")) for segment in both)
    async with serving(tmp_path, long, short) as (_, session):
        manifest = long.manifest
        namespace = manifest.namespace
        asked = wire.LookupRequest(manifest.heads.folder, b"".join(page_hashes(9)))
        for _ in range(2):
            async with session.post(wire.Route.LOOKUP, data=msgspec.msgpack.encode(asked)) as response:
                assert response.status == 200
        summary = await get(session, wire.Route.SUMMARY)
        assert await get(session, wire.Route.SUMMARY) == summary  # it may be some seconds old
        assert [each["lookups"] for each in summary["clients"]] == [2]  # whoever looks at the page does not count
        sizes = [len(each.data) + len(each.manifest.encode()) for each in (long, short)]
        (folder,) = summary["folders"]
        expected = {
            "cache": "bfloat16, pages of 1, layers 0",
            "found_tokens": 2 * 8 * namespace.page_size,
            "folder": manifest.heads.folder,
            "model": "org/llama",
            "model_identity": namespace.model,
            "quantiser": "klt 6.5e-4",
            "quantiser_identity": namespace.quantiser,
            "num_segments": 2,
            "num_tokens": 10 * namespace.page_size,
            "raw_bytes": 10 * manifest.geometry.page_bytes,
            "stored_bytes": sum(sizes),
        }
        assert {key: folder[key] for key in expected} == expected
        assert summary["history"][-1]["values"]["stored_bytes"] == sum(sizes)
        rows = {
            long.manifest.key.manifest_name: (8, sizes[0], False),
            short.manifest.key.manifest_name: (2, sizes[1], False),
        }
        for prefix in ("", "8-", "2", "4-"):
            listed = await get(session, wire.Route.SEGMENTS, folder=folder["folder"], prefix=prefix)
            assert {each["name"]: (each["num_pages"], each["stored_bytes"], each["is_pinned"]) for each in listed} == {
                name: row for name, row in rows.items() if name.partition("/")[2].startswith(prefix)
            }
        bad = await get(session, wire.Route.SEGMENTS, status=400, folder=folder["folder"], prefix="%")
        assert "8-91ab" in bad["message"]
        assert await get(session, wire.Route.SEGMENTS, folder="0" * 32 + ".0-1") == []
        about = await get(session, f"{wire.Route.SEGMENTS}/{manifest.key.manifest_name}")
        assert (about["model"], about["quantiser"]) == ("org/llama", "klt 6.5e-4")
        assert (about["model_identity"], about["raw_bytes"]) == (namespace.model, manifest.raw_bytes)
        missing = manifest.key.manifest_name.replace("8-", "4-")
        assert (await get(session, f"{wire.Route.SEGMENTS}/{missing}", status=404))["error"] == "not_found"


async def test_who_reads_and_writes_and_how_long_it_takes() -> None:
    metrics = ServerMetrics()
    request = Mock(method="PUT", remote="10.0.0.7", content_length=100)
    for number in range(70):
        request.remote = f"10.0.0.{number}"
        metrics.answered(request, f"{wire.Route.OBJECTS}/{{name}}", "200", 0.5, 0)
    request.method = "GET"
    metrics.answered(request, f"{wire.Route.OBJECTS}/{{name}}", "200", 0.25, 1000)
    metrics.answered(request, f"{wire.Route.OBJECTS}/{{name}}", "404", 0.25, 50)
    last, before, *others = metrics.clients
    assert (last.address, last.writes, last.written_bytes, last.reads) == ("10.0.0.69", 1, 100, 1)
    assert last.read_bytes == 1000
    assert before.address == "10.0.0.68"
    assert len(others) == 62
    assert metrics.activity()["request_seconds_sum:write"] == 35.0
    assert metrics.activity()["request_seconds_count:read"] == 2
    assert metrics.answer_times({}) == {"read": AnswerTimes(0.3, 0.3), "write": AnswerTimes(1, 1)}
    earlier = metrics.answers_by_time()
    for seconds in (0.002, 0.002, 60.0):
        metrics.answered(request, f"{wire.Route.OBJECTS}/{{name}}", "200", seconds, 0)
    assert metrics.answer_times(earlier) == {"read": AnswerTimes(0.003, inf)}


async def test_samples_that_fail_cost_a_line_of_log(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):  # of a store that answers nothing
        await pages.PageHandlers(Mock(), Mock(), ServerMetrics(), Mock())._sample()
    assert len(caplog.records) <= 1


async def test_what_a_store_shows_of_what_it_has_no_key_for(tmp_path: Path) -> None:
    """Names and sizes; no codecs."""
    segment = secure_segment(make_segment(page_hashes(4), 0, 4), KEYS)
    digests = []
    for number in (1, 2):
        name, data = seal_profile(save(tmp_path, number), KEYS)
        path = tmp_path / "store" / ".profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1e9 + number, 1e9 + number))
        digests.append(path.name)
    async with serving(tmp_path / "store", segment) as (_, session):
        summary = await get(session, wire.Route.SUMMARY)
        about = await get(session, f"{wire.Route.SEGMENTS}/{segment.manifest.key.manifest_name}")
    assert [each["codecs"] for each in about["codings"]] == [["aes-256-gcm"]]
    (row,) = summary["folders"]
    assert (row["num_segments"], row["num_tokens"], row["model_identity"]) == (1, 4, "conformance")
    newest, older = summary["profiles"]
    assert [newest["digest"], older["digest"]] == digests[::-1]
    assert [newest["is_newest"], older["is_newest"]] == [True, False]
    assert (newest["model"], newest["put_s"], newest["problem"]) == ("numbers", 1e9 + 2, "")


async def test_what_servers_audits_found_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SUMMARY_AGE_S", -1.0)
    segment = make_segment(page_hashes(4), 0, 4)
    folder = segment.manifest.heads.folder
    found = Audits(model="m", quantiser="klt 1e-3", num_audits=30, at_s=1e9, ratio=3.0, typical=1.8, num_recent=20)
    async with serving(tmp_path, segment) as (server, session):
        (row,) = (await get(session, wire.Route.SUMMARY))["folders"]
        assert row["audits"] == []
        store = HttpStore(server.url)
        await store.tell_audits(folder, found)
        await store.tell_audits(f"{'0' * 32}.0-1", found)  # it may have been deleted: nothing goes wrong
        ((told,),) = [row["audits"] for row in (await get(session, wire.Route.SUMMARY))["folders"]]
        assert (told["client"], msgspec.convert(told["audits"], Audits)) == ("127.0.0.1", found)
        assert told["says"].endswith("it does not fit the prompts")
        assert "calibrate --publish" in told["advice"]
        await store.tell_audits(folder, msgspec.structs.replace(found, off="3 of the last 3 audits"))
        ((told,),) = [row["audits"] for row in (await get(session, wire.Route.SUMMARY))["folders"]]
        assert told["says"] == "nothing of it is used: 3 of the last 3 audits"
        await store.close()
        for name, status in ((folder, 400), ("odd", 404)):
            async with session.put(f"{wire.Route.AUDITS}/{name}", data=b"{}") as response:
                assert response.status == status


async def test_a_summary_has_failures_and_the_token_s_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(store: LocalStore, kind: NoteKind) -> None:
        raise StoreError("io", "a bad disk")

    tokens = tmp_path / "tokens"
    tokens.write_text("read r\nadmin a\n")
    async with serving(tmp_path / "store", make_segment(page_hashes(4), 0, 4), token_file=tokens) as (_, session):
        with monkeypatch.context() as patched:
            patched.setattr(LocalStore, "notes", fail)
            async with session.get(f"{wire.Route.NOTES}/pins", headers={"Authorization": "Bearer r"}) as response:
                assert response.status == 500
        for token, role in (("r", "read"), ("a", "admin")):
            async with session.get(wire.Route.SUMMARY, headers={"Authorization": f"Bearer {token}"}) as response:
                assert response.headers["KVFetch-Role"] == role
                summary = await response.json()
        (failure,) = summary["failures"]
        at_s = failure.pop("at_s")
        assert 0 <= summary["now_s"] - at_s < 600
        assert failure == {"client": "127.0.0.1", "what": "GET /v1/notes/pins", "cause": "io", "message": "a bad disk"}
        assert summary["version"] == __version__
        assert (summary["host"], summary["directory"]) == (socket.gethostname(), str(tmp_path / "store"))
        assert 0 < summary["disk_free_bytes"] < summary["disk_bytes"]


async def test_looking_is_no_use_and_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    name = segment.manifest.key.manifest_name
    async with serving(tmp_path, segment) as (_, session):
        (before,) = await get(session, wire.Route.SEGMENTS, folder=segment.manifest.heads.folder)
        await get(session, wire.Route.SUMMARY)
        await get(session, f"{wire.Route.SEGMENTS}/{name}")
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert name in (await get(session, f"{wire.Route.SEGMENTS}/{name}", status=422))["message"]
    store = LocalStore(tmp_path)
    assert await store.last_uses([segment.manifest.key]) == [before["last_used_s"]]
    await store.close()


@pytest.mark.parametrize("fault", [ValueError("a text that nobody thought of"), StoreError("io", "a bad sector")])
async def test_an_odd_folder_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    """Because of its names, or as its manifest cannot be read."""
    good, bad = make_segment(page_hashes(4), 0, 4), make_segment(page_hashes(4), 0, 4, model="bad")
    place, name = (LocalStore, "peek") if isinstance(fault, StoreError) else (Labels, "model_name")
    method = getattr(place, name)

    def fail(self: object, what: str) -> object:
        if what in ("bad", bad.manifest.key.manifest_name):
            raise fault
        return method(self, what)

    monkeypatch.setattr(place, name, fail)
    async with serving(tmp_path, good, bad) as (_, session):
        rows = {row["folder"]: row for row in (await get(session, wire.Route.SUMMARY))["folders"]}
    assert rows[good.manifest.heads.folder]["model"] == "conformance"
    assert rows[bad.manifest.heads.folder]["model"] == ""
    assert rows[bad.manifest.heads.folder]["num_segments"] == 1
