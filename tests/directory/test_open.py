from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.directory import LocalStore, open_store
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores import HttpOptions, S3Options
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.s3 import S3Store


async def test_urls_pick_the_store() -> None:
    remote = open_store("https://store.example/kv/", token="t", options=HttpOptions(timeout_s=3))
    local = open_store("file:///var/cache/with%20space", capacity_bytes=5)
    bucket = open_store("s3://bucket/prefix", s3=S3Options({"region": "eu-central-1"}))
    indexed = open_store("s3://bucket", s3=S3Options(index="redis://host"))
    stores = remote, local, bucket, indexed
    assert [type(store) for store in stores] == [HttpStore, LocalStore, S3Store, IndexedS3Store]
    assert isinstance(remote, HttpStore)
    assert (remote.url, remote.options.timeout_s) == ("https://store.example/kv", 3)
    assert isinstance(local, LocalStore)
    assert local.root == Path("/var/cache/with space")
    for store in stores:
        await store.close()
    assert "secret" not in repr(S3Options({"secret_access_key": "secret"}, "redis://:secret@host"))


URLS = {
    "expected http://HOST:PORT or https://HOST:PORT or s3:": "gs://bucket host:80",
    "expected http://": "/var/cache",
    "absolute path": "file://host/path file:relative",
    "query": "file:///path?x=1",
    "malformed": "http://host:port/",
    "": "http:// http://user:se-cret@host http://host/?query http://host/#part",
    "is not s3://BUCKET": "s3:// s3://b?x s3://b/x#y s3://user@b/x s3://b:80/x s3://b/../x s3://b//x s3://b/ä",
}
INDEXES = "http://:se-cret@host redis:// redis://:se-cret@host:port redis://host?db=1 redis+cluster://host/1"
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((url, {}, message) for message, urls in URLS.items() for url in urls.split()),
    *(("s3://bucket", {"s3": S3Options(index=index)}, "the index's URL") for index in INDEXES.split()),
    ("file:///x", {"token": "t"}, "token"),
    ("file:///x", {"capacity_bytes": 0}, "capacity_bytes is 0"),
    ("http://x", {"capacity_bytes": 1}, "capacity_bytes"),
    ("s3://x", {"capacity_bytes": 1}, "capacity_bytes"),
    ("s3://x", {"token": "t"}, "is a bucket"),
]


def test_what_is_refused_names_what_is_allowed_and_no_secrets() -> None:
    for url, options, message in REFUSED:
        with pytest.raises(ConfigError, match=message or None) as caught:
            open_store(url, **options)
        assert "se-cret" not in str(caught.value)
