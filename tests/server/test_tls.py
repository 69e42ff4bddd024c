"""TLS between a store and its clients: certificates of both, and files that are replaced.

What commands say of a store's certificate is in tests/tools/test_refusals.py.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import ssl
import sys
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from harness.metrics import own_metric
from harness.small_segments import data_object
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until, wait_until
from sgl_kvfetch import user_files
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.metrics import record_certificates
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores import HttpOptions, TlsFiles
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.tls import ends_of
from tests.stores.conformance import failing
from tests.tools.conftest import kvfetch

pytestmark = pytest.mark.process


FILES = ("server", "client", "ca", "client_ca")


class Rotating:
    """The files of a store and its client, which are replaced as Kubernetes replaces a secret's: by one link."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.old, self.new = (trustme.CA(key_type=trustme.KeyType.ECDSA) for _ in range(2))
        for name in FILES:
            (folder / f"{name}.pem").symlink_to(f"..data/{name}.pem")
        self.write("first")

    def write(self, version: str, **new: trustme.CA) -> None:
        """Replace all files. They are of the old CA, but for those that are named."""
        of = dict.fromkeys(FILES, self.old) | new
        made = self.folder / version
        made.mkdir()
        for name in ("server", "client"):
            cert = of[name].issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
            cert.private_key_and_cert_chain_pem.write_to_path(made / f"{name}.pem")
            (made / f"{name}.pem").chmod(0o600)
        for name in ("ca", "client_ca"):
            of[name].cert_pem.write_to_path(made / f"{name}.pem")
        link = self.folder / "..tmp"
        link.symlink_to(version)
        link.replace(self.folder / "..data")

    def config(self) -> ServerConfig:
        """The server's, which demands a certificate."""
        pem, client_ca = self.folder / "server.pem", self.folder / "client_ca.pem"
        return ServerConfig(self.folder / "store", port=0, tls_cert=pem, tls_key=pem, tls_client_ca=client_ca)

    @property
    def files(self) -> TlsFiles:
        return TlsFiles(ca=str(self.folder / "ca.pem"), cert=str(self.folder / "client.pem"))

    def client(self, url: str, files: TlsFiles | None = None) -> HttpStore:
        return HttpStore(url, options=HttpOptions(max_attempts=1, tls=files or self.files))


@pytest.fixture
def files(tmp_path: Path) -> Rotating:
    return Rotating(tmp_path)


@pytest.mark.parametrize("command", ["inspect", "doctor --store-only"])
async def test_commands_show_a_certificate(files: Rotating, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(files.folder / "ca.pem"))
    async with running_server(files.config()) as server:
        for cert, is_shown in (("", False), (str(files.folder / "client.pem"), True), ("nosuch.pem", False)):
            if cert:
                monkeypatch.setenv("KVFETCH_TLS_CLIENT_CERT", cert)
            result = await asyncio.to_thread(kvfetch, *command.split(), server.url)
            assert (result.exit_code == 0) == is_shown, result.output
        assert "cannot use the TLS files" in result.output
        monkeypatch.delenv("KVFETCH_TLS_CLIENT_CERT")
        monkeypatch.setenv("KVFETCH_TLS_CLIENT_KEY", "key.pem")
        result = await asyncio.to_thread(kvfetch, *command.split(), server.url)
        assert "KVFETCH_TLS_CLIENT_KEY=key.pem needs KVFETCH_TLS_CLIENT_CERT" in result.output


async def test_clients_need_a_certificate(files: Rotating) -> None:
    """Whatever is asked, a client that the server refuses is told why."""
    stranger = files.folder / "stranger.pem"
    files.new.issue_cert("x").private_key_and_cert_chain_pem.write_to_path(stranger)
    content = bytes(3 << 20)
    name = data_object(content)
    async with running_server(files.config()) as server:
        for cert, why in ((None, "wants a certificate from us, and got none"), (stranger, "no CA that it knows")):
            store = files.client(server.url, replace(files.files, cert=None if cert is None else str(cert)))
            for ask in (store.get(name), store.get(name, 0, 1 << 20), store.put(name, content)):
                with failing("tls", why):
                    await ask
            await store.close()
        store = files.client(server.url)
        assert await store.get(name) is None
        await store.close()


def test_unusable_files_are_config_errors(files: Rotating) -> None:
    config, pem = files.config(), files.folder / "server.pem"
    (files.folder / "nonsense").write_text("nonsense")
    for bad in (files.folder / "missing", files.folder / "nonsense"):
        for use in (
            lambda bad=bad: files.client("https://x", TlsFiles(ca=str(bad))),
            lambda bad=bad: replace(config, tls_client_ca=bad).tls_context(),
        ):
            with pytest.raises(ConfigError, match=bad.name):
                use()
    for one in ("tls_cert", "tls_key", "tls_client_ca"):
        with pytest.raises(ConfigError, match="need each other"):
            ServerConfig(files.folder, **{one: pem})  # type: ignore[arg-type]


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


@pytest.mark.parametrize("file", FILES)
async def test_a_replaced_file_needs_no_restart(file: str, files: Rotating, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CAs: three files are of the one, and the fourth is of the other until it is replaced."""
    monkeypatch.setattr(user_files, "LOOK_EVERY_S", 0.01)
    files.write("A", **{file: files.new})
    async with running_server(files.config()) as server:
        store = files.client(server.url)

        async def is_ill() -> bool:
            return not await is_well(store)

        assert await is_ill()
        files.write("B")
        await until(lambda: is_well(store))
        files.write("C", **{file: files.new})  # the CA that counted is gone, too, and not only another added
        await until(is_ill)
        await store.close()


def test_sighup_reads_tokens_and_certificates_again(files: Rotating) -> None:
    """Before anybody would look by itself whether they have changed."""
    tokens, pem = files.folder / "tokens", str(files.folder / "server.pem")
    tokens.write_text("old")
    tokens.chmod(0o600)
    script = "from sgl_kvfetch import tools, user_files; user_files.LOOK_EVERY_S = 1e6; tools.main()"
    options = ("--tls-cert", pem, "--tls-key", pem, "--token-file", str(tokens))
    ca = files.folder / "ca.pem"
    with StoreProcess(
        files.folder / "store", extra_args=options, ca_file=ca, command=(sys.executable, "-c", script)
    ) as store:
        tokens.write_text("new")
        os.kill(store.pid, signal.SIGHUP)
        for what in ("tokens", "certificates"):
            wait_until(lambda what=what: f"read the {what} again" in store.log(), found=store.log)  # type: ignore[misc]
        trusting = ssl.create_default_context(cafile=ca)
        for token, status in (("new", 200), ("old", 401)):
            connection = http.client.HTTPSConnection(urlsplit(store.url).netloc, timeout=WAIT_S, context=trusting)
            connection.request("GET", "/v1/objects", headers={"Authorization": f"Bearer {token}"})
            assert connection.getresponse().status == status
            connection.close()


async def test_metrics_say_when_certificates_end(files: Rotating) -> None:
    found: dict[str, float] = {}
    tls = replace(files.files, on_ends=found.update)
    assert tls.context()
    assert found == ends_of(files.folder / "client.pem", files.folder / "ca.pem")
    record_certificates(found)
    for file in ("cert", "ca"):
        assert own_metric("sgl_kvfetch_certificate_end_timestamp_seconds", file=file) == found[file]
    metrics = ServerMetrics()
    files.config().tls_context(metrics.record_certificates)
    for file, end_s in ends_of(files.folder / "server.pem", files.folder / "client_ca.pem").items():
        value = metrics.registry.get_sample_value("kvfetch_server_certificate_end_timestamp_seconds", {"file": file})
        assert value == end_s
