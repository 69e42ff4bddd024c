"""Stores behind a proxy that the environment names: both kinds of remote stores take it alike."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.forward_proxy import ForwardProxy
from harness.s3_server import BUCKET, S3Server, s3_config
from harness.small_segments import data_object
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import HttpOptions, Store
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import environment_proxy
from sgl_kvfetch.stores.s3 import S3Store
from tests.stores.conformance import failing

pytestmark = pytest.mark.process

CONTENT = bytes(range(256)) * 40
NAME = data_object(CONTENT)
TOKEN = "s3cret-Zq7"
OPTIONS = HttpOptions(timeout_s=WAIT_S, connect_timeout_s=WAIT_S, max_attempts=1)
HURRIED = HttpOptions(timeout_s=5, connect_timeout_s=1, max_attempts=1)  # for origins that nobody may answer at


@dataclass
class Rig:
    """A server that has an object, a proxy that reaches it under any name, and a port that refuses connections."""

    kind: str
    proxy: ForwardProxy
    dead_port: int

    def open(self, origin: str, options: HttpOptions = OPTIONS) -> Store:
        """Open the store at an origin, such as http://store.test:80."""
        if self.kind == "http":
            return HttpStore(origin, token=TOKEN, options=options)
        return S3Store(f"s3://{BUCKET}/kv", options=options, config=s3_config(origin))

    async def check(self, origin: str, is_proxied: bool) -> None:
        """Read the object from a store, and require that this goes through the proxy, or does not."""
        self.proxy.requests.clear()
        store, found = self.open(origin, OPTIONS if is_proxied else HURRIED), None
        with suppress(StoreError):
            found = await store.get(NAME)
        await store.close()
        assert bool(self.proxy.requests) == is_proxied
        assert found == CONTENT or not is_proxied


@pytest.fixture(params=["http", "s3"])
async def rig(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Rig]:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    async with running_server(ServerConfig(tmp_path, port=0, token=TOKEN)) as served:
        host, port = (served.host, served.port) if request.param == "http" else (s3.host, s3.port)
        with socket.socket() as taken:  # so that no server of another test gets the port
            taken.bind(("127.0.0.1", 0))
            async with ForwardProxy(host, port) as proxy:
                rig = Rig(request.param, proxy, taken.getsockname()[1])
                store = rig.open(f"http://{host}:{port}")
                await store.put(NAME, CONTENT)
                await store.close()
                yield rig


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_the_environments_proxy(name: str, rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no netrc replaces the token."""
    (tmp_path / "netrc").write_text("machine store.test login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    await rig.check("http://store.test", False)
    monkeypatch.setenv(name, f"http://user:s%40lt@127.0.0.1:{rig.proxy.port}")
    await rig.check("http://store.test", True)
    assert rig.proxy.requests[0][1].startswith("http://store.test")
    assert set(rig.proxy.authorizations) == {"Basic dXNlcjpzQGx0"}
    monkeypatch.setenv(name, f"127.0.0.1:{rig.proxy.port}")
    await rig.check("http://store.test", True)
    monkeypatch.setenv(name, "")
    await rig.check("http://store.test", False)


NO_PROXY: list[tuple[str, str, bool]] = [
    ("test", "store.test", False),
    ("ore.test", "store.test", True),
    ("other.test, .TEST", "store.test", False),
    ("*", "store.test", False),
    ("*", "192.0.2.1", False),
    ("192.0.2.0/24", "192.0.2.1", False),
    ("192.0.3.0/24,2001:db8::/32", "192.0.2.1", True),
    ("", "localhost", False),
    ("", "[::1]", False),
    ("", "169.254.169.254", False),
]


async def test_no_proxy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{rig.proxy.port}")
    for excluded, host, expected in NO_PROXY:
        monkeypatch.setenv("NO_PROXY", excluded)
        await rig.check(f"http://{host}:{rig.dead_port}", expected)


async def test_https_has_a_proxy_of_its_own(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{rig.dead_port}")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{rig.proxy.port}")
    store = rig.open("https://store.test")
    with pytest.raises(StoreError):  # the server behind the proxy speaks no TLS
        await store.get(NAME)
    assert set(rig.proxy.requests) == {("CONNECT", "store.test:443")}
    await store.close()


async def test_a_proxy_that_does_not_answer_is_an_error(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://user:s%40lt@127.0.0.1:{rig.dead_port}")
    store = rig.open("http://store.test")
    # obstore does not say what it could not reach.
    said = rf"(?s)the environment's proxy.*127\.0\.0\.1:{rig.dead_port}" if rig.kind == "http" else None
    with failing("refused", said) as caught:
        await store.get(NAME)
    assert "lt@" not in str(caught.value)
    await store.close()


async def test_the_environments_endpoint_has_a_proxy(rig: Rig, s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    config = s3_config("")
    del config["endpoint"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{rig.dead_port}")
    async with ForwardProxy(s3.host, s3.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        await S3Store(f"s3://{BUCKET}/kv", options=OPTIONS, config=config).get(NAME)
        assert proxy.requests


@pytest.mark.parametrize("url", ["http://store.test", "https://store.test"])
def test_proxies_of_other_kinds_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:s3cret@127.0.0.1:1080")
    for open_store in (HttpStore, lambda url: S3Store("s3://bucket", config=s3_config(url))):
        with pytest.raises(ConfigError, match=r"ALL_PROXY .* socks5:// .* NO_PROXY") as caught:
            open_store(url)
        assert "s3cret" not in str(caught.value)
    monkeypatch.setenv("ALL_PROXY", "http://user:s3cret@127.0.0.1:1080")
    assert "s3cret" not in repr(environment_proxy("http"))
