from __future__ import annotations

import asyncio
import http.client
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme
from typer.testing import Result

from harness.metrics import own_metric
from harness.small_segments import data_object
from harness.waiting import WAIT_S, until
from sgl_kvfetch import user_files
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.metrics import record_certificates
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions, TlsFiles
from sgl_kvfetch.tls import ends_of
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


async def test_a_client_refuses_a_server_that_its_ca_did_not_sign(url: str, certificates: Certificates) -> None:
    assert await reason_of_get(HttpStore(url, options=HttpOptions(max_attempts=1))) == "tls"


@pytest.mark.parametrize("url", [True], indirect=True)
@pytest.mark.parametrize("command", ["inspect", "doctor", "pin"])
async def test_commands_show_a_certificate(
    url: str, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    more = ["--store-only"] if command == "doctor" else []

    async def run() -> Result:
        return await asyncio.to_thread(kvfetch, command, url, *more)

    refused = await run()
    assert refused.exit_code != 0, refused.output
    monkeypatch.setenv("KVFETCH_TLS_CLIENT_CERT", str(certificates.client))
    shown = await run()
    assert shown.exit_code == 0, shown.output
    monkeypatch.setenv("KVFETCH_TLS_CLIENT_CERT", "nosuch.pem")
    assert "cannot use the TLS files" in (await run()).output
    monkeypatch.delenv("KVFETCH_TLS_CLIENT_CERT")
    monkeypatch.setenv("KVFETCH_TLS_CLIENT_KEY", "key.pem")
    assert "KVFETCH_TLS_CLIENT_KEY=key.pem needs KVFETCH_TLS_CLIENT_CERT" in (await run()).output


async def test_a_tls_server_does_not_answer_plain_http(url: str) -> None:
    plain = HttpStore(url.replace("https", "http"), options=HttpOptions(max_attempts=1))
    assert await reason_of_get(plain) in ("truncated", "protocol")


@pytest.mark.parametrize("url", [True], indirect=True)
async def test_clients_need_a_certificate(url: str, certificates: Certificates, tmp_path: Path) -> None:
    """Whatever is asked, a client that the server refuses is told why."""
    stranger = tmp_path / "stranger.pem"
    trustme.CA(key_type=trustme.KeyType.ECDSA).issue_cert("x").private_key_and_cert_chain_pem.write_to_path(stranger)
    content = bytes(3 << 20)
    for cert, why in ((None, "wants a certificate from us, and got none"), (stranger, "no CA that it knows")):
        tls = TlsFiles(ca=str(certificates.ca), cert=None if cert is None else str(cert))
        store = HttpStore(url, options=HttpOptions(max_attempts=1, tls=tls))
        name = data_object(content)
        for ask in (store.get(name), store.get(name, 0, 1 << 20), store.put(name, content)):
            with pytest.raises(StoreError, match=why) as caught:
                await ask
            assert caught.value.reason == "tls"
        await store.close()
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


class Rotating:
    """The files of a store and its client, which are replaced as Kubernetes replaces a secret's: by one link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old, self.new = (trustme.CA(key_type=trustme.KeyType.ECDSA) for _ in range(2))
        self.names = ("server.pem", "client.pem", "ca.pem", "client_ca.pem")
        for name in self.names:
            (folder / name).symlink_to(f"..data/{name}")

    def write(
        self, version: str, *, server: trustme.CA, client: trustme.CA, ca: trustme.CA, client_ca: trustme.CA
    ) -> None:
        made = self.folder / version
        made.mkdir()
        for name, authority in (("server.pem", server), ("client.pem", client)):
            cert = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
            cert.private_key_and_cert_chain_pem.write_to_path(made / name)
            (made / name).chmod(0o600)
        ca.cert_pem.write_to_path(made / "ca.pem")
        client_ca.cert_pem.write_to_path(made / "client_ca.pem")
        link = self.folder / "..tmp"
        link.symlink_to(version)
        link.replace(self.folder / "..data")

    def config(self) -> ServerConfig:
        pem = self.folder / "server.pem"
        client_ca = self.folder / "client_ca.pem"
        return ServerConfig(self.folder / "store", port=0, tls_cert=pem, tls_key=pem, tls_client_ca=client_ca)

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(ca=str(self.folder / "ca.pem"), cert=str(self.folder / "client.pem"))


async def is_well(store: HttpStore) -> bool:
    """Whether a new connection of the same client gets an answer."""
    if store._session is not None:
        await store._session.close()
        store._session = None
    try:
        return await store.get(data_object(b"x")) is None
    except StoreError as e:
        if e.reason == "tls":
            return False
        raise


@pytest.mark.parametrize("file", ["server", "client", "ca", "client_ca"])
async def test_a_file_that_is_replaced_counts_without_a_restart(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two CAs: three files are of the one, and the fourth is of the other until it is replaced."""
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.01)
    files = Rotating(tmp_path)
    of = dict.fromkeys(("server", "client", "ca", "client_ca"), files.old)
    files.write("A", **(of | {file: files.new}))
    async with running_server(files.config()) as server:
        store = HttpStore(server.url, options=HttpOptions(max_attempts=1, tls=files.files))
        assert not await is_well(store)
        files.write("B", **of)
        await until(lambda: is_well(store))
        files.write("C", **(of | {file: files.new}))  # the CA that counted is gone, too, and not only another added
        await until(lambda: is_ill(store))
        await store.close()


async def is_ill(store: HttpStore) -> bool:
    return not await is_well(store)


async def test_files_that_break_leave_the_certificates_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.01)
    caplog.set_level("INFO")
    files = Rotating(tmp_path)
    of = dict.fromkeys(("server", "client", "ca", "client_ca"), files.old)
    files.write("A", **of)
    async with running_server(files.config()) as server:
        store = HttpStore(server.url, options=HttpOptions(max_attempts=1, tls=files.files))
        for name in files.names:
            (tmp_path / "A" / name).write_text("nonsense")
        await until(lambda: caplog.text.count("keeping the old certificates") > 0)
        assert await is_well(store)
        assert caplog.text.count("keeping the old certificates") == 2  # the server's and the client's, once each
        files.write("B", **dict.fromkeys(of, files.new))
        await until(lambda: "read the certificates again" in caplog.text)
        await until(lambda: is_well(store))
        await store.close()


SERVE = """
import logging, sys
from pathlib import Path
from sgl_kvfetch import user_files
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import run_server
user_files.LOOK_EVERY_S = 1e6
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
pem = Path(sys.argv[2])
run_server(ServerConfig(Path(sys.argv[1]), port=0, tls_cert=pem, tls_key=pem, token_file=Path(sys.argv[3])))
"""


def test_sighup_reads_tokens_and_certificates_again(tmp_path: Path) -> None:
    files, tokens = Rotating(tmp_path), tmp_path / "tokens"
    files.write("A", **dict.fromkeys(("server", "client", "ca", "client_ca"), files.old))
    tokens.write_text("old")
    tokens.chmod(0o600)
    command = [sys.executable, "-c", SERVE, str(tmp_path / "store"), str(tmp_path / "server.pem"), str(tokens)]
    trusting = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().split()[-1]
            assert "version" in server.stdout.readline()
            tokens.write_text("new")
            server.send_signal(signal.SIGHUP)
            said = server.stdout.readline() + server.stdout.readline()
            assert "read the tokens again" in said
            assert "read the certificates again" in said
            for token, status in (("new", 200), ("old", 401)):
                connection = http.client.HTTPSConnection(urlsplit(url).netloc, timeout=WAIT_S, context=trusting)
                connection.request("GET", "/v1/objects", headers={"Authorization": f"Bearer {token}"})
                assert connection.getresponse().status == status
                connection.close()
        finally:
            server.kill()


async def test_metrics_say_when_certificates_end(tmp_path: Path) -> None:
    files = Rotating(tmp_path)
    files.write("A", **dict.fromkeys(("server", "client", "ca", "client_ca"), files.old))
    found: dict[str, float] = {}
    tls = TlsFiles(files.files.ca, files.files.cert, on_ends=found.update)
    assert tls.context()
    assert found == ends_of(tmp_path / "client.pem", tmp_path / "ca.pem")
    record_certificates(found)
    for file in ("cert", "ca"):
        assert own_metric("sgl_kvfetch_certificate_end_timestamp_seconds", file=file) == found[file]
    metrics = ServerMetrics()
    files.config().tls_context(metrics.record_certificates)
    for file, end_s in ends_of(tmp_path / "server.pem", tmp_path / "client_ca.pem").items():
        value = metrics.registry.get_sample_value("kvfetch_server_certificate_end_timestamp_seconds", {"file": file})
        assert value == end_s
