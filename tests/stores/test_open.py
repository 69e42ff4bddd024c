from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.http import HttpOptions, HttpStore
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.stores.open import open_store


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket", "use http://, https:// or file:///path"),
        ("/var/cache", "use http://"),
        ("", "use http://"),
        ("file://host/path", "absolute path"),
        ("file:relative", "absolute path"),
        ("file:///path?x=1", "query"),
        ("http://host:port/", "malformed"),
    ],
)
def test_errors_for_other_urls_name_what_is_allowed(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(url)


def test_options_for_another_kind_of_store_are_refused() -> None:
    with pytest.raises(ConfigError, match="token"):
        open_store("file:///x", token="t")
    with pytest.raises(ConfigError, match="capacity_bytes"):
        open_store("http://x", capacity_bytes=1)
