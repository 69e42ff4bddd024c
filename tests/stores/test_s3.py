"""The S3 store against moto's server."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import obstore
import pytest
import trustme

from harness.faults import Fault, FaultyProxy
from harness.s3_server import BUCKET, S3Server, open_bucket, s3_config
from harness.small_segments import data_object, make_segment, page_hashes
from sgl_kvfetch import user_files
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores import HttpOptions, TlsFiles, object_digest
from sgl_kvfetch.stores.s3 import S3Store
from tests.stores.conformance import failing
from tests.stores.conftest import saying

URL = f"s3://{BUCKET}/some/prefix"


@pytest.fixture
async def proxied(s3: S3Server, s3_proxy: FaultyProxy) -> AsyncIterator[S3Store]:
    options = HttpOptions(timeout_s=20, max_attempts=2, backoff_s=0.01)
    store = S3Store(URL, options=options, config=s3_config(s3_proxy.url))
    yield store
    await store.close()


CONTENT = bytes(range(256)) * 4000
NAME = data_object(CONTENT)


@pytest.mark.process
async def test_large_objects_are_limited(s3: S3Server) -> None:
    store = S3Store(URL, options=HttpOptions(max_object_bytes=1000), config=s3.config)
    await store.put(NAME, CONTENT)
    for call in (store.get(NAME), store.get(NAME, 0, 1001)):
        with failing("too_large"):
            await call


@pytest.mark.process
async def test_large_puts_have_parts(monkeypatch: pytest.MonkeyPatch, proxied: S3Store, s3_proxy: FaultyProxy) -> None:
    monkeypatch.setattr("sgl_kvfetch.stores.s3.MULTIPART_BYTES", 1000)
    monkeypatch.setattr("sgl_kvfetch.stores.s3.PART_BYTES", 5 << 20)
    content = CONTENT * 7
    await proxied.put(data_object(content), content)
    assert sum("partNumber=" in path for _, path in s3_proxy.requests) == 2
    assert await proxied.get(data_object(content)) == content


@pytest.mark.process
async def test_only_objects_of_the_store_are_listed_and_deleted(s3: S3Server) -> None:
    store, other = S3Store(URL, config=s3.config), S3Store(f"s3://{BUCKET}/some", config=s3.config)
    await store.put(NAME, CONTENT)
    await other.put(NAME, CONTENT)
    assert [info.name async for info in other.list()] == [NAME]
    assert await other.delete_prefix("") == 1
    assert await store.get(NAME) == CONTENT


async def _replaced(store: S3Store) -> tuple[str, bytes, bytes]:
    """Put a manifest. Return its name, its content, and another content."""
    chain = page_hashes(4)
    old, new = make_segment(chain, 0, 4), make_segment(chain, 0, 4, codec="deflate")
    await store.put(old.manifest.key.manifest_name, old.manifest.encode())
    return old.manifest.key.manifest_name, old.manifest.encode(), new.manifest.encode()


class OtherServer(FaultyProxy):
    """Makes of S3 a server that does not know the header If-Match ("deaf"), or one that answers a conditional PUT with
    status 501 as OpenStack Swift does ("refusing"). Ceph, which knows only ETags without quotes, is in the conformance
    tests."""

    kind = ""

    async def _answer(
        self, fault: Fault | None, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        condition = _IF_MATCH.search(head)
        if condition is not None and self.kind == "refusing":
            fault = Fault("error", status=501)
        head = _IF_MATCH.sub(b"", head) if self.kind == "deaf" else head
        await super()._answer(fault, head, reader, writer)


_IF_MATCH = re.compile(rb"(?im)^if-match: *(.*)\r\n")


@pytest.mark.process
@pytest.mark.parametrize("kind", ["deaf", "refusing"])
async def test_a_server_that_does_not_support_if_match_is_named_and_not_trusted(
    s3: S3Server, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with OtherServer(s3.host, s3.port) as proxy:
        proxy.kind = kind
        store = S3Store(URL, config=s3_config(proxy.url))
        name, before, after = await _replaced(store)
        for _ in range(2):
            for call in (store.replace(name, after, object_digest(before)), store.require_replace()):
                with failing("invalid", "does not support If-Match"):
                    await call
        assert await store.get(name) == before
    (record,) = caplog.records
    assert "does not support If-Match on PUT; stored segments are not replaced" in record.message


@pytest.mark.process
async def test_the_probe_of_if_match_leaves_nothing(s3: S3Server, proxied: S3Store, s3_proxy: FaultyProxy) -> None:
    name, before, after = await _replaced(proxied)
    await s3_proxy.set(Fault("error", status=503))
    with failing("server"):
        await proxied.replace(name, after, object_digest(before))
    await s3_proxy.set(None)
    s3_proxy.requests.clear()
    assert await proxied.replace(name, after, object_digest(before))
    probes = [(method, path) for method, path in s3_proxy.requests if "probe" in path]
    assert [method for method, _ in probes] == ["PUT"] * 3
    assert await proxied.replace(name, before, object_digest(after))
    assert [request for request in s3_proxy.requests if "probe" in request[1]] == probes
    listed = obstore.list(open_bucket(s3.config)).collect()
    assert [meta["path"] for meta in listed] == [f"some/prefix/{name}"]


@pytest.mark.parametrize(
    ("config", "tls", "message"),
    [
        ({"regoin": "eu-central-1"}, {}, "'regoin' is not valid"),
        ({}, {"cert": "x"}, "certificate"),
        ({}, {"ca": "missing.pem"}, r"missing\.pem"),
    ],
)
def test_a_bad_config_is_named(config: dict[str, Any], tls: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        S3Store(URL, config=config, options=HttpOptions(tls=TlsFiles(**tls)))


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        ("RequestTimeTooSkewed", "clock", "this machine's clock, which says 2"),
        ("AccessDenied", "unauthorised", "AccessDenied: it says why"),
        ("NoSuchBucket", "invalid", "there is no bucket"),
    ],
)
async def test_what_s3_says_is_told_without_xml(code: str, reason: str, said: str) -> None:
    xml = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>it says why</Message></Error>".encode()
    status = b"404 Not Found" if code == "NoSuchBucket" else b"403 Forbidden"
    answer = b"HTTP/1.1 %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (status, len(xml), xml)
    async with saying(answer) as url:
        with pytest.raises(StoreError, match=f"^[^<]*{said}[^<]*$") as caught:
            await S3Store(URL, config=s3_config(url), options=HttpOptions(max_attempts=1)).get(NAME)
    assert caught.value.reason == reason


@pytest.mark.parametrize(("size", "hour", "reason"), [(999, 1, "protocol"), (50, 1, "truncated"), (9, 0, "protocol")])
async def test_an_answer_s_length_and_date_are_checked(size: int, hour: int, reason: str) -> None:
    head = b"Content-Length: 100\r\nTransfer-Encoding: chunked\r\nLast-Modified: 1 Jan 0001 0%d:00:00 +0100" % hour
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, bytes(size))
    async with saying(b"HTTP/1.1 200 OK\r\n%b\r\n\r\n%b" % (head, body)) as url:
        with failing(reason, "of 100 bytes|the 100 bytes|year 0 is out of range"):
            await S3Store(URL, config=s3_config(url), options=HttpOptions(max_attempts=1)).get(NAME)


async def test_a_ca_that_is_replaced_counts_for_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto's server has no TLS: a listener with a certificate stands for S3, and answers 404 to all."""
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.0)
    old, new = (trustme.CA(key_type=trustme.KeyType.ECDSA) for _ in range(2))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    new.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA).configure_cert(context)

    answer = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with saying(answer, context) as url:
        old.cert_pem.write_to_path(tmp_path / "ca.pem")
        tls = TlsFiles(ca=str(tmp_path / "ca.pem"))
        store = S3Store(URL, config=s3_config(url), options=HttpOptions(max_attempts=1, tls=tls))
        name = data_object(b"x")
        with failing("tls"):
            await store.head(name)
        new.cert_pem.write_to_path(tmp_path / "ca.pem")
        assert await store.head(name) is None
