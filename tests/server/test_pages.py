"""What the store's page reads: over HTTP, without a browser."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from harness.small_segments import make_segment, page_hashes, put_segment
from sgl_kvfetch import __version__
from sgl_kvfetch.codec.container.encryption import EncryptionKeys
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.labels import Labels
from sgl_kvfetch.prompts import page_hashes as hashes_of
from sgl_kvfetch.server import ServerConfig, pages
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.profiles import seal_profile
from sgl_kvfetch.stores.verified import Damaged, Verified
from tests.segments import with_labels
from tests.stores.test_profiles import BOTH, save

AUTHORISED = {"Authorization": "Bearer secret"}


@asynccontextmanager
async def serving(root: Path, *segments: CodedSegment, **options: Any) -> AsyncIterator[aiohttp.ClientSession]:
    store = LocalStore(root)
    for segment in segments:
        await put_segment(store, segment)
    await store.close()
    config = ServerConfig(root, port=0, grace_s=1, **options)
    async with running_server(config) as server, aiohttp.ClientSession(server.url) as session:
        yield session


async def get(session: aiohttp.ClientSession, path: str, status: int = 200, **query: str) -> Any:
    async with session.get(path, params=query) as response:
        body = await response.json()
        assert response.status == status, body
        return body


async def test_only_the_page_itself_needs_no_token(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as session:
        kinds = {"": "text/html", ".css": "text/css", ".js": "text/javascript"}
        for path in wire.PAGE_PATHS:
            async with session.get(path) as response:
                assert (response.status, response.content_type) == (200, kinds[Path(path).suffix])
                policy = response.headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
        for path in (wire.Route.SUMMARY, wire.Route.SEGMENTS, f"{wire.Route.SEGMENTS}/x", f"{wire.Route.PICTURES}/x"):
            await get(session, path, status=401)
        async with session.post(wire.Route.PROMPTS, json={}) as response:
            assert response.status == 401
        async with session.get(wire.Route.SUMMARY, headers=AUTHORISED) as response:
            assert response.status == 200


async def test_what_is_stored(tmp_path: Path) -> None:
    long, short = make_segment(page_hashes(8), 0, 8), make_segment(page_hashes(3, "other"), 0, 2)
    async with serving(tmp_path, long, short) as session:
        summary = await get(session, wire.Route.SUMMARY)
        (folder,) = summary["folders"]
        manifest = long.manifest
        assert folder["folder"] == manifest.heads.folder
        assert folder["model"] == manifest.namespace.model
        assert folder["num_segments"] == 2
        assert folder["num_tokens"] == 10 * manifest.namespace.page_size
        assert folder["raw_bytes"] == 10 * manifest.geometry.page_bytes
        sizes = [len(each.data) + len(each.manifest.encode()) for each in (long, short)]
        assert folder["stored_bytes"] == sum(sizes)
        assert summary["history"][-1]["values"]["stored_bytes"] == sum(sizes)
        listed = await get(session, wire.Route.SEGMENTS, folder=folder["folder"])
        assert {each["name"]: (each["num_pages"], each["stored_bytes"], each["is_pinned"]) for each in listed} == {
            long.manifest.key.manifest_name: (8, sizes[0], False),
            short.manifest.key.manifest_name: (2, sizes[1], False),
        }
        assert await get(session, wire.Route.SEGMENTS, folder="0" * 32 + ".0-1") == []
        about = await get(session, f"{wire.Route.SEGMENTS}/{manifest.key.manifest_name}")
        assert (about["model"], about["num_spans"]) == (manifest.namespace.model, manifest.num_spans)
        missing = manifest.key.manifest_name.replace("8-", "4-")
        assert (await get(session, f"{wire.Route.SEGMENTS}/{missing}", status=404))["error"] == "not_found"


async def test_profiles_are_shown(tmp_path: Path) -> None:
    digests = []
    for number in (1, 2):
        name, data = seal_profile(save(tmp_path, number), BOTH)
        path = tmp_path / "store" / ".profiles" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1e9 + number, 1e9 + number))
        digests.append(path.name)
    async with serving(tmp_path / "store", make_segment(page_hashes(4), 0, 4)) as session:
        newest, older = (await get(session, wire.Route.SUMMARY))["profiles"]
    assert [newest["digest"], older["digest"]] == digests[::-1]
    assert [newest["is_newest"], older["is_newest"]] == [True, False]
    assert (newest["model"], newest["put_s"], newest["problem"]) == ("numbers", 1e9 + 2, "")


async def test_what_verify_found_is_shown_until_it_is_deleted_or_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_SUMMARY_AGE_S", -1.0)
    segments = [make_segment(page_hashes(4, seed), 0, 4) for seed in ("sound", "deleted", "rewritten", "damaged")]
    manifests = [segment.manifest.key.manifest_name for segment in segments]
    found = Verified(4, 1000, 103, tuple(Damaged(name, "checksum does not match") for name in [*manifests[1:], "odd"]))
    async with serving(tmp_path, *segments) as session:
        assert (await get(session, wire.Route.SUMMARY))["verified"] is None
        async with session.put(wire.Route.VERIFIED, data=b"{}") as response:
            assert response.status == 400
            assert "num_segments" in (await response.json())["message"]
        async with session.put(wire.Route.VERIFIED, data=found.encode()) as response:
            assert response.status == 201
        (tmp_path / manifests[1]).unlink()
        os.utime(tmp_path / manifests[2], (1e10, 1e10))
        shown = await get(session, wire.Route.SUMMARY)
    assert 0 <= shown["now_s"] - shown["verified"]["at_s"] < 600
    assert [each["name"] for each in shown["verified"]["damaged"]] == [manifests[3]]
    assert shown["verified"]["num_damaged"] == 100


async def test_a_result_of_verify_that_cannot_be_read_does_not_hide_the_page(tmp_path: Path) -> None:
    (tmp_path / ".verified.json").write_text("{")
    async with serving(tmp_path) as session:
        assert (await get(session, wire.Route.SUMMARY))["verified"] is None


async def test_models_and_quantisers_have_names_for_people(tmp_path: Path) -> None:
    segment = with_labels(make_segment(page_hashes(8), 0, 8), Labels("org/llama", "klt 6.5e-4"))
    async with serving(tmp_path, segment) as session:
        (folder,) = (await get(session, wire.Route.SUMMARY))["folders"]
        about = await get(session, f"{wire.Route.SEGMENTS}/{segment.manifest.key.manifest_name}")
    namespace = segment.manifest.namespace
    for found in (folder, about):
        assert (found["model"], found["quantiser"]) == ("org/llama", "klt 6.5e-4")
        assert (found["model_identity"], found["quantiser_identity"]) == (namespace.model, namespace.quantiser)


async def test_a_summary_has_the_last_failures_and_the_token_s_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(store: LocalStore) -> None:
        raise StoreError("io", "a bad disk")

    tokens = tmp_path / "tokens"
    tokens.write_text("read r\nadmin a\n")
    async with serving(tmp_path / "store", make_segment(page_hashes(4), 0, 4), token_file=tokens) as session:
        monkeypatch.setattr(LocalStore, "pins", fail)
        async with session.get(wire.Route.PINS, headers={"Authorization": "Bearer r"}) as response:
            assert response.status == 500
        for token, role in (("r", "read"), ("a", "admin")):
            async with session.get(wire.Route.SUMMARY, headers={"Authorization": f"Bearer {token}"}) as response:
                assert response.headers["KVFetch-Role"] == role
                summary = await response.json()
        (failure,) = summary["failures"]
        at_s = failure.pop("at_s")
        assert 0 <= summary["now_s"] - at_s < 600
        assert failure == {"client": "127.0.0.1", "what": "GET /v1/pins", "cause": "io", "message": "a bad disk"}
        assert summary["version"] == __version__
        assert (summary["host"], summary["directory"]) == (socket.gethostname(), str(tmp_path / "store"))
        assert 0 < summary["disk_free_bytes"] < summary["disk_bytes"]


async def test_only_admins_pin_a_prompt(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("write w\nadmin a\n")
    query = {"prompt": [1, 2, 3], "page_size": 1, "pin": True, "label": "intro"}
    async with serving(tmp_path / "store", token_file=tokens) as session:
        for token, status in (("w", 403), ("a", 200)):
            headers = {"Authorization": f"Bearer {token}"}
            async with session.post(wire.Route.PROMPTS, json=query, headers=headers) as response:
                assert response.status == status
                found = await response.json()
        assert found["pin"] == hashes_of([1, 2, 3], 1)[-1].hex()


async def test_another_site_s_page_cannot_pin(tmp_path: Path) -> None:
    """A browser sends such a POST without asking the store first, and a store on loopback needs no token."""
    body = json.dumps({"prompt": [1, 2], "page_size": 1, "pin": True})
    async with serving(tmp_path) as session:
        async with session.post(wire.Route.PROMPTS, data=body, headers={"Content-Type": "text/plain"}) as response:
            assert response.status == 415
        assert (await get(session, wire.Route.PINS))["names"] == []


async def test_segments_by_the_beginning_of_their_names(tmp_path: Path) -> None:
    long, short = make_segment(page_hashes(8), 0, 8), make_segment(page_hashes(3, "other"), 0, 2)
    folder = long.manifest.heads.folder
    async with serving(tmp_path, long, short) as session:
        for prefix, segments in (("8-", [long]), ("2", [short]), ("4-", []), ("", [long, short])):
            found = await get(session, wire.Route.SEGMENTS, folder=folder, prefix=prefix)
            assert {each["name"] for each in found} == {each.manifest.key.manifest_name for each in segments}
        assert "8-91ab" in (await get(session, wire.Route.SEGMENTS, status=400, folder=folder, prefix="%"))["message"]


async def test_a_summary_may_be_some_seconds_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_SUMMARY_AGE_S", 600.0)
    async with serving(tmp_path) as session:
        first = await get(session, wire.Route.SUMMARY)
        assert await get(session, wire.Route.SUMMARY) == first
        assert first["folders"] == []


async def test_looking_is_no_use(tmp_path: Path) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    name = segment.manifest.key.manifest_name
    async with serving(tmp_path, segment) as session:
        folder = segment.manifest.heads.folder
        (before,) = await get(session, wire.Route.SEGMENTS, folder=folder)
        await get(session, wire.Route.SUMMARY)
        await get(session, f"{wire.Route.SEGMENTS}/{name}")
        store = LocalStore(tmp_path)
        assert await store.last_uses([segment.manifest.key]) == [before["last_used_s"]]
        await store.close()


async def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    segment = make_segment(page_hashes(4), 0, 4)
    name = segment.manifest.key.manifest_name
    async with serving(tmp_path, segment) as session:
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        for what in (wire.Route.SEGMENTS, wire.Route.PICTURES):
            assert name in (await get(session, f"{what}/{name}", status=422))["message"]


async def test_a_prompt_has_as_many_pages_as_a_lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "MAX_LOOKUP_PAGES", 3)
    async with serving(tmp_path) as session:
        for num_tokens, status in ((3, 200), (4, 400)):
            query = {"prompt": list(range(num_tokens)), "page_size": 1}
            async with session.post(wire.Route.PROMPTS, json=query) as response:
                assert response.status == status


async def test_how_much_of_a_prompt_is_stored(tmp_path: Path) -> None:
    tokens = list(range(40))
    segment = make_segment(hashes_of(tokens, 16), 0, 2)
    async with serving(tmp_path, segment) as session:

        async def ask(status: int = 200, **query: Any) -> Any:
            async with session.post(wire.Route.PROMPTS, json=query) as response:
                assert response.status == status
                return await response.json()

        digest = segment.manifest.namespace.digest()
        found = await ask(prompt=tokens, page_size=16)
        assert found["num_pages"] == 2
        assert set(found["stored_pages"]) == {digest}
        assert (await ask(prompt=tokens[1:], page_size=16))["stored_pages"] in ({}, {digest: 0})
        assert (await ask(prompt=[1, 2], page_size=16))["num_pages"] == 0
        assert "--tokenizer" in (await ask(400, prompt="text", page_size=16))["message"]
        assert "page_size" in (await ask(400, prompt=[1], page_size=0))["message"]
        assert "prompt" in (await ask(400, page_size=1))["message"]


async def test_what_a_store_without_the_key_shows_of_encrypted_segments(tmp_path: Path) -> None:
    """Its names and sizes, and how much of a prompt is stored; no codecs and no pictures."""
    hashes = hashes_of([1, 2, 3, 4], 1, None)
    segment = secure_segment(make_segment(hashes, 0, 4), EncryptionKeys({"ours": b"k" * 32}), False)
    name = segment.manifest.key.manifest_name
    async with serving(tmp_path, segment) as session:
        (row,) = (await get(session, wire.Route.SUMMARY))["folders"]
        assert (row["num_segments"], row["num_tokens"], row["model_identity"]) == (1, 4, "conformance")
        about = await get(session, f"{wire.Route.SEGMENTS}/{name}")
        assert [variant["codecs"] for variant in about["variants"]] == [["aes-256-gcm"]]
        asked = {"prompt": [1, 2, 3, 4], "page_size": 1}
        async with session.post(wire.Route.PROMPTS, json=asked) as response:
            assert list((await response.json())["stored_pages"].values()) == [4]
        message = (await get(session, f"{wire.Route.PICTURES}/{name}", status=501))["message"]
        assert "cannot draw the frames" in message
        assert "'ours'" in message
