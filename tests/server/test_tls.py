from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme
from typer.testing import Result

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions, TlsFiles
from sgl_kvfetch.testing import FOLDER, data_object, make_segment, page_hashes, put_segment
from tests.tools.conftest import kvfetch

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Certificates:
    ca: Path
    server: Path
    server_key: Path
    client: Path  # with its key


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    found = Certificates(*(folder / name for name in ("ca.pem", "server.pem", "server.key", "client.pem")))
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority.cert_pem.write_to_path(found.ca)
    server = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    server.private_key_pem.write_to_path(found.server_key)
    for blob in server.cert_chain_pems:
        blob.write_to_path(found.server, append=True)
    authority.issue_cert("rank-0.example").private_key_and_cert_chain_pem.write_to_path(found.client)
    return found


@pytest.fixture
async def url(request: pytest.FixtureRequest, tmp_path: Path, certificates: Certificates) -> AsyncIterator[str]:
    """A server that speaks TLS; the parameter says whether clients need a certificate."""
    client_ca = certificates.ca if getattr(request, "param", False) else None
    config = ServerConfig(
        tmp_path, port=0, tls_cert=certificates.server, tls_key=certificates.server_key, tls_client_ca=client_ca
    )
    async with running_server(config) as server:
        assert server.url.startswith("https://")
        yield server.url


async def reason_of_get(store: HttpStore) -> str:
    with pytest.raises(StoreError) as caught:
        await store.get(data_object(b"x"))
    await store.close()
    return caught.value.reason


async def test_large_objects_both_ways(url: str, certificates: Certificates) -> None:
    content = bytes(range(256)) * (40 << 10) + b"end"
    store = HttpStore(url, options=HttpOptions(tls=TlsFiles(ca=str(certificates.ca))))
    await store.put(data_object(content), content)
    assert await store.get(data_object(content)) == content
    for start, length in ((0, 1), (12345, 3_000_000), (len(content) - 1, 1), (256 << 10, 256 << 10)):
        assert await store.get(data_object(content), start, length) == content[start : start + length]
    await put_segment(store, make_segment(page_hashes(4), 0, 4))
    assert (await store.lookup(FOLDER, page_hashes(4))).num_pages == 4
    await store.close()


async def test_a_client_refuses_a_server_that_its_ca_did_not_sign(url: str, certificates: Certificates) -> None:
    assert await reason_of_get(HttpStore(url, options=HttpOptions(max_attempts=1))) == "tls"


@pytest.mark.parametrize("url", [True], indirect=True)
@pytest.mark.parametrize("command", ["inspect", "doctor", "lookup", "pin"])
async def test_commands_show_a_certificate(
    url: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    more = {"doctor": ["--store-only"], "lookup": ["--prompt", "[1, 2]", "--page-size", "1"]}.get(command, [])
    cert = ["--tls-client-cert", str(certificates.client)]

    async def run(*args: str) -> Result:
        return await asyncio.to_thread(kvfetch, command, url, *more, *args)

    refused = await run()
    assert refused.exit_code != 0, refused.output
    shown = await run(*cert)
    assert shown.exit_code == 0, shown.output
    monkeypatch.setenv("KVFETCH_TLS_CLIENT_CERT", str(certificates.client))
    assert (await run()).exit_code == 0
    assert "cannot use the TLS files" in (await run("--tls-client-cert", "nosuch.pem")).output
    monkeypatch.delenv("KVFETCH_TLS_CLIENT_CERT")
    assert "needs --tls-client-cert" in (await run("--tls-client-key", "key.pem")).output


async def test_a_tls_server_does_not_answer_plain_http(url: str) -> None:
    plain = HttpStore(url.replace("https", "http"), options=HttpOptions(max_attempts=1))
    assert await reason_of_get(plain) in ("truncated", "protocol")


@pytest.mark.parametrize("url", [True], indirect=True)
async def test_clients_need_a_certificate(url: str, certificates: Certificates) -> None:
    without = HttpOptions(max_attempts=1, tls=TlsFiles(ca=str(certificates.ca)))
    assert await reason_of_get(HttpStore(url, options=without)) in ("truncated", "refused")
    known = HttpOptions(tls=TlsFiles(ca=str(certificates.ca), cert=str(certificates.client)))
    store = HttpStore(url, options=known)
    assert await store.get(data_object(b"x")) is None
    await store.close()


def test_unusable_files_are_config_errors(tmp_path: Path, certificates: Certificates) -> None:
    (tmp_path / "nonsense").write_text("nonsense")
    for bad in (tmp_path / "missing", tmp_path / "nonsense"):
        with pytest.raises(ConfigError, match=bad.name):
            HttpStore("https://x", options=HttpOptions(tls=TlsFiles(ca=str(bad))))
        with pytest.raises(ConfigError, match=bad.name):
            HttpStore("https://x", options=HttpOptions(tls=TlsFiles(cert=str(bad))))
        with pytest.raises(ConfigError, match=bad.name):
            ServerConfig(tmp_path, tls_cert=bad, tls_key=certificates.server_key).tls_context()
        with pytest.raises(ConfigError, match=bad.name):
            ServerConfig(
                tmp_path, tls_cert=certificates.server, tls_key=certificates.server_key, tls_client_ca=bad
            ).tls_context()
    for one in ({"tls_cert": certificates.server}, {"tls_key": certificates.server_key}, {"tls_client_ca": bad}):
        with pytest.raises(ConfigError, match="need each other"):
            ServerConfig(tmp_path, **one)  # type: ignore[arg-type]
