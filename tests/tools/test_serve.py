"""The server as a process, and the other commands against it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch import __version__
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.tools.conftest import Stored, kvfetch

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
LISTENING = re.compile(rf"{TIME} INFO kvfetch: serving (?P<root>.+), and its web UI, on (?P<url>http://\S+)\n")


@contextmanager
def serving(root: Path, *args: str, token: str | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    environment = {key: value for key, value in os.environ.items() if key != TOKEN_ENV}
    if token is not None:
        environment[TOKEN_ENV] = token
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "serve", str(root), "--port", "0", *args]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        match = LISTENING.fullmatch(line)
        assert match, line + process.stderr.read()
        assert match["root"] == str(root)
        yield match["url"], process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.process
def test_serve_with_a_token_and_look_at_it(stored: Stored, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    in_directory = json.loads(kvfetch("inspect", stored.url, "--json").stdout)
    with serving(stored.root, "--capacity", "1GiB", token="secret") as (url, process):
        for command in ("inspect", "verify"):
            refused = kvfetch(command, url)
            assert refused.exit_code == 2
            assert "401" in refused.stderr
            assert kvfetch(command, url, "--token-file", str(token_file)).exit_code == 0
        over_http = json.loads(kvfetch("inspect", url, "--token-file", str(token_file), "--json").stdout)
        assert over_http == in_directory
        stored.data_path(0).write_bytes(bytes(stored.data_path(0).stat().st_size))
        assert kvfetch("verify", url, "--token-file", str(token_file)).exit_code == 1

        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.process
def test_serve_makes_its_directory_and_stops_on_sigterm(tmp_path: Path) -> None:
    root = tmp_path / "new" / "store"
    with serving(root) as (url, process):
        assert root.is_dir()
        assert "no segments" in kvfetch("inspect", url).stdout
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.mark.process
def test_lines_of_the_log_have_our_name_once(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    tokens.chmod(0o644)  # which is warned of, as in SGLang's servers
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "serve", str(tmp_path / "store"), "--port", "0"]
    with subprocess.Popen([*command, "--token-file", str(tokens)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        warned, listens = process.stderr.readline(), process.stderr.readline()
        process.terminate()
    assert "kvfetch: all users of this machine may read the secret in" in warned
    assert re.match(f"{TIME} WARNING kvfetch: ", warned)
    assert LISTENING.fullmatch(listens)


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "capacity", "shown", "access"),
    [
        ((), "2GiB", "2 GiB", "everybody on this machine, without a token"),
        (("--insecure", "--host", "0.0.0.0"), "10MiB", "10 MiB", "EVERYBODY who reaches this address, without a token"),
        ((), "1000000TiB", "977 PiB", "with one token"),
        (("--token-file", "{file}"), "2GiB", "2 GiB", "with tokens of {file}"),
    ],
)
def test_serve_says_how_it_serves(
    tmp_path: Path, args: tuple[str, ...], capacity: str, shown: str, access: str
) -> None:
    """It warns of a capacity that the disk does not have."""
    file = tmp_path / "tokens"
    file.write_text("secret\n")
    file.chmod(0o600)
    given = [arg.format(file=file) for arg in args]
    token = "secret" if access == "with one token" else None
    with serving(tmp_path / "store", "--capacity", capacity, *given, token=token) as (_, process):
        process.terminate()
        assert process.stderr is not None
        line, *rest = process.stderr.read().splitlines()
    assert f"version {__version__}; capacity: {shown}, on a disk of " in line
    assert line.endswith(f"free; access: {access.format(file=file)}")
    assert "secret" not in line
    assert any("more than the disk's" in each for each in rest) == (capacity == "1000000TiB")


def test_a_server_leaves_its_process_as_it_was(tmp_path: Path) -> None:
    """Threads of the tests that came after once took turns ten times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.004)
    try:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            assert kvfetch("serve", str(tmp_path), "--port", str(taken.getsockname()[1])).exit_code == 2
        assert sys.getswitchinterval() == pytest.approx(0.004)
    finally:
        sys.setswitchinterval(before)
