"""What commands say about a first mistake, on real stores over real sockets: what was wrong, and what to type."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import trustme

from harness.engine import free_port
from harness.s3_server import BUCKET, S3Server
from harness.store_process import StoreProcess
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.tools.conftest import kvfetch

READ, ADMIN = "3c1f", "e05d"


@dataclass(frozen=True)
class Stores:
    plain: str
    tls: str
    ca: Path
    with_tokens: str
    roles: Path  # its token file


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("stores")
    ca, cert, key, roles = (folder / name for name in ("ca.pem", "cert.pem", "key.pem", "roles"))
    authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
    authority.cert_pem.write_to_path(ca)
    server = authority.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    server.private_key_pem.write_to_path(key)
    server.cert_chain_pems[0].write_to_path(cert)
    roles.write_text(f"# role token\nread {READ}\nadmin {ADMIN}\n")
    tls = ("--tls-cert", str(cert), "--tls-key", str(key))
    with (
        StoreProcess(folder / "plain") as plain,
        StoreProcess(folder / "tls", extra_args=tls, ca_file=ca) as over_tls,
        StoreProcess(folder / "tokens", extra_args=("--token-file", str(roles))) as with_tokens,
    ):
        yield Stores(plain.url, over_tls.url, ca, with_tokens.url, roles)


def refusal(*args: str) -> str:
    """Run a command that fails, in one line, and return that."""
    result = kvfetch(*args)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("kvfetch: ")
    assert result.stderr.count("\n") == 1, result.stderr
    return result.stderr


def in_a_process(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, for libraries that read the environment when they are imported."""
    command = [sys.executable, "-m", "sgl_kvfetch.tools", *args]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)


@pytest.mark.process
def test_https_on_an_http_store(stores: Stores) -> None:
    url = stores.plain.replace("http:", "https:")
    said = refusal("inspect", url)
    assert f"{url.removeprefix('https://')} does not speak TLS: write its URL with http://" in said
    assert "kvfetch serve" not in said


@pytest.mark.process
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_http_on_an_https_store(stores: Stores, command: str) -> None:
    assert f"it speaks TLS: type {stores.tls}\n" in refusal(command, stores.tls.replace("https:", "http:"))


def test_a_connection_that_breaks_is_not_taken_for_tls(tmp_path: Path) -> None:
    with closing_server() as port:
        assert "TLS" not in refusal("inspect", f"http://127.0.0.1:{port}")


@pytest.mark.process
def test_a_certificate_of_an_unknown_ca(stores: Stores) -> None:
    said = refusal("inspect", stores.tls)
    assert "no CA that this machine knows has signed the certificate of 127.0.0.1" in said
    assert "SSL_CERT_FILE" in said
    assert "kvfetch serve" not in said
    assert in_a_process("inspect", stores.tls, SSL_CERT_FILE=str(stores.ca)).returncode == 0


@pytest.mark.process
def test_a_certificate_of_another_host(stores: Stores) -> None:
    url = stores.tls.replace("127.0.0.1", "localhost")
    said = in_a_process("inspect", url, SSL_CERT_FILE=str(stores.ca)).stderr
    assert "the certificate of localhost:" in said
    assert "not valid for 'localhost'" in said
    assert "SSL_CERT_FILE" not in said


@pytest.mark.process
def test_no_token(stores: Stores) -> None:
    said = refusal("inspect", stores.with_tokens)
    assert "the store wants a token and got none" in said
    assert "give the store's token: --token-file FILE, or KVFETCH_TOKEN in the environment" in said


@pytest.mark.process
def test_a_wrong_token(stores: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text("wrong\n")
    said = refusal("inspect", stores.with_tokens, "--token-file", str(file))
    assert "the store does not know this token" in said
    assert f"the token came from --token-file {file}: give another one with --token-file FILE" in said
    assert "got none" not in said
    assert "wrong\n" not in said  # the token
    monkeypatch.setenv(TOKEN_ENV, "wrong")
    assert f"the token came from {TOKEN_ENV} in the environment" in refusal("inspect", stores.with_tokens)


@pytest.mark.process
def test_a_token_whose_role_is_too_low(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, READ)
    said = refusal("pin", stores.with_tokens, "--prompt", "[1]", "--page-size", "1")
    assert "this needs a token with the role admin" in said
    assert f"the token came from {TOKEN_ENV} in the environment: give another one" in said


@pytest.mark.process
@pytest.mark.parametrize("text", [f"# role token\nread {READ}\nadmin {ADMIN}\n", f"admin {ADMIN}\n"])
def test_the_servers_token_file_is_no_clients(stores: Stores, tmp_path: Path, text: str) -> None:
    file = tmp_path / "roles"
    file.write_text(text)
    said = refusal("inspect", stores.with_tokens, "--token-file", str(file))
    assert f"--token-file {file} has more than one word" in said
    assert "lines ROLE TOKEN" in said
    assert ADMIN not in said
    file.write_text(f"# of the store\n{ADMIN}\n")
    assert kvfetch("inspect", stores.with_tokens, "--token-file", str(file)).exit_code == 0


def test_an_empty_store_has_no_page_size(tmp_path: Path) -> None:
    assert kvfetch("pin", str(tmp_path), "--prompt", "[1]", "--page-size", "1").stderr == ""


@contextmanager
def closing_server() -> Iterator[int]:
    """Yield the port of a server that accepts connections, and closes each without an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                connection.close()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_model_that_nobody_has_is_asked_for_once(tmp_path: Path) -> None:
    """Not for each file, six times, which took a minute."""
    asked: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as hub:

        def answer() -> None:
            while True:
                try:
                    connection, _ = hub.accept()
                except OSError:
                    return
                asked.append(connection.recv(65536))
                connection.sendall(
                    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                )
                connection.close()

        threading.Thread(target=answer, daemon=True).start()
        at_hub = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        pin = ("pin", str(tmp_path), "--prompt", "a text", "--page-size", "1", "--model", "nosuch/model")
        done = in_a_process(*pin, **at_hub, HF_HUB_OFFLINE="0", TRANSFORMERS_OFFLINE="0")
        hub.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kvfetch: ")]
    assert line.startswith("kvfetch: no tokenizer of 'nosuch/model': it is no folder on this machine")
    assert "give the model's folder, or tokens" in line
    assert sum(b"nosuch/model" in request for request in asked) == 1


class _OtherServer(BaseHTTPRequestHandler):
    """Answers 501, and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.process
@pytest.mark.parametrize("command", ["inspect", "verify", "clear"])
def test_an_address_that_is_no_stores(command: str, stores: Stores) -> None:
    """Another program's, as SGLang's, or a path of a store."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _OtherServer) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        for url in (f"http://127.0.0.1:{other.server_port}", f"{stores.plain}/v1"):
            assert "no kvfetch store has this address; a store's URL is the one that kvfetch" in refusal(command, url)
        other.shutdown()


@pytest.mark.process
def test_why_without_sglang(stores: Stores, tmp_path: Path) -> None:
    why = ("why", str(tmp_path), "--prompt", "[1]", "--server")
    said = refusal(*why, stores.plain)
    assert said.startswith(f"kvfetch: --server {stores.plain} is no SGLang server: ")
    assert "30000" in said
    assert "does not speak TLS" in refusal(*why, stores.plain.replace("http:", "https:"))


@pytest.mark.process
def test_s3_without_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")  # of a machine in no cloud
    said = refusal("inspect", f"s3://{BUCKET}")
    assert "no credentials were given" in said
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment" in said
    assert "token" not in said
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    assert kvfetch("inspect", f"s3://{BUCKET}").exit_code == 0
    monkeypatch.delenv("AWS_ENDPOINT", raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    said = refusal("inspect", f"s3://{BUCKET}")
    assert "AWS_ENDPOINT_URL" in said
    assert "kvfetch serve" not in said


@pytest.mark.process
def test_s3_over_tls(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store's TLS is good enough: nothing is asked before the handshake."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", stores.tls)
    assert "SSL_CERT_FILE" in refusal("inspect", f"s3://{BUCKET}")
    monkeypatch.setenv("AWS_ENDPOINT_URL", stores.plain.replace("http:", "https:"))
    assert "does not speak TLS" in refusal("inspect", f"s3://{BUCKET}")


@pytest.mark.parametrize(
    "args",
    [
        ("inspect", ".", "--token-file", "NOSUCH"),
        ("inspect", ".", "--key-file", "NOSUCH"),
        ("pin", ".", "--page-size", "1", "--file", "NOSUCH"),
        ("serve", "store", "--token-file", "FOLDER"),
        ("serve", "store", "--tls-cert", "NOSUCH", "--tls-key", "key"),
        ("estimate", "--link", "1Gbps", "--prefill-tps", "1", "--model", "NOSUCH"),
        ("calibrate", "--model", "m", "--out", "profile", "--text", "NOSUCH"),
        ("verify", "NOSUCH"),
    ],
)
def test_a_file_is_named_once(args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"NOSUCH": "no-such-file", "FOLDER": "a-folder"}
    (tmp_path / "a-folder").mkdir()
    result = kvfetch(*(names.get(word, word) for word in args))
    assert result.exit_code == 2
    (name,) = {names[word] for word in args if word in names}
    assert result.stderr.splitlines()[-1].count(name) == 1, result.stderr
    assert "Errno" not in result.stderr
