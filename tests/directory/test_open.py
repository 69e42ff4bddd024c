from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_kvfetch.directory.local import LocalStore, open_store
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
from sgl_kvfetch.stores.open import S3Options
from sgl_kvfetch.stores.remote import HttpOptions
from sgl_kvfetch.stores.s3 import S3Store


async def test_urls_pick_the_store() -> None:
    remote = open_store("https://store.example/kv/", token="t", options=HttpOptions(timeout_s=3))
    assert isinstance(remote, HttpStore)
    assert remote.url == "https://store.example/kv"
    assert remote.options.timeout_s == 3
    local = open_store("file:///var/cache/with%20space", capacity_bytes=5)
    assert isinstance(local, LocalStore)
    assert local.root == Path("/var/cache/with space")
    await remote.close()
    await local.close()


URLS = {
    "expected http://HOST:PORT or https://HOST:PORT or s3:": "gs://bucket ftp://x host:80",
    "expected http://": "/var/cache",
    "absolute path": "file://host/path file:relative",
    "query": "file:///path?x=1",
    "malformed": "http://host:port/",
    "": "http:// http://user:se-cret@host http://host/?query http://host/#part",
    "is not s3://BUCKET": "s3:// s3:///x s3://b?x s3://b/x#y s3://user@b/x s3://b:80/x s3://b/../x s3://b//x s3://b/ä",
}
INDEXES = (
    "http://:se-cret@host redis:// redis://:se-cret@host:port redis://host/not-a-number redis://host?db=1"
    " redis+cluster://host/1 host:6379"
)


def test_errors_for_other_urls_name_what_is_allowed_and_no_secrets() -> None:
    wrong = [(url, "", message) for message, urls in URLS.items() for url in urls.split()]
    wrong += [("", "", "expected http://"), *(("s3://bucket", index, "the index's URL") for index in INDEXES.split())]
    for url, index, message in wrong:
        with pytest.raises(ConfigError, match=message or None) as caught:
            open_store(url, s3=S3Options(index=index) if index else S3Options())
        assert "se-cret" not in str(caught.value)


def test_options_for_another_kind_of_store_are_refused() -> None:
    with pytest.raises(ConfigError, match="token"):
        open_store("file:///x", token="t")
    for url in ("http://x", "s3://x"):
        with pytest.raises(ConfigError, match="capacity_bytes"):
            open_store(url, capacity_bytes=1)
    with pytest.raises(ConfigError, match="is a bucket"):
        open_store("s3://x", token="t")


async def test_a_bucket_may_have_an_index() -> None:
    plain = open_store("s3://bucket/prefix", s3=S3Options({"region": "eu-central-1"}))
    assert type(plain) is S3Store
    indexed = open_store("s3://bucket", s3=S3Options(index="redis://host"))
    assert isinstance(indexed, IndexedS3Store)
    for store in (plain, indexed):
        await store.close()
    with pytest.raises(ConfigError, match="'regoin' is not valid"):
        open_store("s3://bucket", s3=S3Options({"regoin": "x"}))
    assert "secret" not in repr(S3Options({"secret_access_key": "secret"}, "redis://:secret@host"))


@pytest.mark.parametrize("module", ["s3", "redis_index"])
def test_what_to_install_is_named(monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    monkeypatch.setitem(sys.modules, f"sgl_kvfetch.stores.{module}", None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=r"pip install '\.\[s3\]'"):
        open_store("s3://bucket", s3=S3Options(index="redis://host"))


@pytest.mark.process
def test_listing_a_directory_imports_no_data_plane(tmp_path: Path) -> None:
    program = """
import sys
from sgl_kvfetch.tools import main
sys.argv[0] = "kvfetch"
try:
    main()
finally:
    print([name for name in sys.modules if name.startswith(("sgl_kvfetch.plane", "torch"))])
"""
    command = [sys.executable, "-c", program, "inspect", str(tmp_path)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert (said[1], said[-1]) == ("no segments", "[]")
