"""Stores behind a proxy that the environment names: both kinds of remote stores take it alike."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from harness.forward_proxy import ForwardProxy
from harness.s3_server import BUCKET, S3Server, s3_config
from harness.small_segments import data_object
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions, environment_proxy
from sgl_kvfetch.stores.s3 import S3Store

pytestmark = pytest.mark.process

CONTENT = bytes(range(256)) * 40
NAME = data_object(CONTENT)
TOKEN = "s3cret-Zq7"
OPTIONS = HttpOptions(timeout_s=WAIT_S, connect_timeout_s=WAIT_S, max_attempts=1)
HURRIED = HttpOptions(timeout_s=5, connect_timeout_s=1, max_attempts=1)  # for origins that nobody may answer at
OpenStore = Callable[[str, HttpOptions], Store]  # from an origin, such as http://store.test:80
Check = Callable[[str, bool], Awaitable[None]]


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)


@pytest.fixture(params=["http", "s3"])
async def server(
    request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path
) -> AsyncIterator[tuple[str, int, OpenStore]]:
    """Host and port of a server that has an object, and how to open a store there."""
    if request.param == "s3":

        def open_s3(origin: str, options: HttpOptions) -> Store:
            return S3Store(f"s3://{BUCKET}/kv", options=options, config=s3_config(origin))

        await open_s3(f"http://{s3.host}:{s3.port}", OPTIONS).put(NAME, CONTENT)
        yield s3.host, s3.port, open_s3
        return
    async with running_server(ServerConfig(tmp_path, port=0, token=TOKEN)) as running:

        def open_http(origin: str, options: HttpOptions) -> Store:
            return HttpStore(origin, token=TOKEN, options=options)

        direct = open_http(running.url, OPTIONS)
        await direct.put(NAME, CONTENT)
        await direct.close()
        yield running.host, running.port, open_http


@pytest.fixture
async def proxy(server: tuple[str, int, OpenStore]) -> AsyncIterator[ForwardProxy]:
    async with ForwardProxy(*server[:2]) as proxy:
        yield proxy


@pytest.fixture
async def check(server: tuple[str, int, OpenStore], proxy: ForwardProxy) -> Check:
    """Reads the object from a store at an origin, and asserts that this goes through the proxy, or does not."""

    async def check(origin: str, is_proxied: bool) -> None:
        proxy.requests.clear()
        store = server[2](origin, OPTIONS if is_proxied else HURRIED)
        try:
            found = await store.get(NAME)
        except StoreError:
            found = None
        finally:
            await store.close()
        assert bool(proxy.requests) == is_proxied
        assert found == CONTENT or not is_proxied

    return check


@pytest.fixture
def dead_port() -> Iterator[int]:
    """A port that refuses connections. It is taken, so that no server of another test gets it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
async def test_the_environments_proxy_is_used(
    name: str, proxy: ForwardProxy, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    await check("http://store.test", False)
    monkeypatch.setenv(name, f"http://user:s%40lt@127.0.0.1:{proxy.port}")
    await check("http://store.test", True)
    assert proxy.requests[0][1].startswith("http://store.test")
    assert set(proxy.authorizations) == {"Basic dXNlcjpzQGx0"}
    monkeypatch.setenv(name, f"127.0.0.1:{proxy.port}")
    await check("http://store.test", True)
    monkeypatch.setenv(name, "")
    await check("http://store.test", False)


NO_PROXY: list[tuple[str, str, bool]] = [
    ("other.test", "store.test", True),
    ("store.test", "store.test", False),
    ("test", "store.test", False),
    (".TEST", "store.test", False),
    ("ore.test", "store.test", True),
    ("other.test, .test", "store.test", False),
    ("*", "store.test", False),
    ("*", "192.0.2.1", False),
    ("192.0.2.0/24", "192.0.2.1", False),
    ("192.0.2.1", "192.0.2.1", False),
    ("192.0.3.0/24,2001:db8::/32", "192.0.2.1", True),
    ("", "192.0.2.1", True),
    ("", "127.0.0.1", False),
    ("", "localhost", False),
    ("", "[::1]", False),
    ("", "169.254.169.254", False),
]


async def test_no_proxy(proxy: ForwardProxy, check: Check, dead_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    for excluded, host, expected in NO_PROXY:
        monkeypatch.setenv("NO_PROXY", excluded)
        await check(f"http://{host}:{dead_port}", expected)


async def test_https_has_a_proxy_of_its_own(
    proxy: ForwardProxy, server: tuple[str, int, OpenStore], dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{dead_port}")
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
    store = server[2]("https://store.test", OPTIONS)
    with pytest.raises(StoreError):  # the server behind the proxy speaks no TLS
        await store.get(NAME)
    assert set(proxy.requests) == {("CONNECT", "store.test:443")}
    await store.close()


async def test_a_proxy_that_does_not_answer_is_an_error(
    server: tuple[str, int, OpenStore], dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", f"http://user:s%40lt@127.0.0.1:{dead_port}")
    store = server[2]("http://store.test", OPTIONS)
    with pytest.raises(StoreError) as caught:
        await store.get(NAME)
    assert caught.value.reason == "refused"
    assert "lt@" not in str(caught.value)
    if isinstance(store, HttpStore):  # obstore does not say what it could not reach
        assert "the environment's proxy" in str(caught.value)
        assert f"127.0.0.1:{dead_port}" in str(caught.value)
    await store.close()


async def test_an_endpoint_in_the_environment_has_its_schemes_proxy(
    s3: S3Server, dead_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = s3_config("")
    del config["endpoint"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test")
    async with ForwardProxy(s3.host, s3.port) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{dead_port}")
        assert await S3Store(f"s3://{BUCKET}/kv", options=OPTIONS, config=config).get(NAME) is None
        assert proxy.requests


@pytest.mark.parametrize("url", ["http://store.test", "https://store.test"])
def test_proxies_of_other_kinds_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://user:s3cret@127.0.0.1:1080")
    for open_store in (HttpStore, lambda url: S3Store("s3://bucket", config=s3_config(url))):
        with pytest.raises(ConfigError, match=r"ALL_PROXY .* socks5:// .* NO_PROXY") as caught:
            open_store(url)
        assert "s3cret" not in str(caught.value)
    assert "s3cret" not in repr(environment_proxy_of("http://user:s3cret@127.0.0.1:1080", monkeypatch))


def environment_proxy_of(url: str, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("ALL_PROXY", url)
    return environment_proxy("http")


async def test_a_netrc_does_not_replace_the_token(
    tmp_path: Path, proxy: ForwardProxy, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "netrc").write_text("machine store.test login someone password else\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HTTP_PROXY", f"http://127.0.0.1:{proxy.port}")
    await check("http://store.test", True)
