"""The server as a process, and the other commands against it."""

from __future__ import annotations

import re
import signal
import stat
from pathlib import Path

import pytest

from harness.store_process import StoreProcess
from sgl_kvfetch import __version__
from tests.tools.conftest import kvfetch

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d"
LISTENING = rf"{TIME} INFO kvfetch: serving (?P<root>.+), and its web UI, on (?P<url>http://\S+)"


@pytest.mark.process
@pytest.mark.parametrize(
    ("args", "capacity", "shown", "access"),
    [
        (("--insecure", "--host", "0.0.0.0"), "10MiB", "10 MiB", "EVERYBODY who reaches this address, without a token"),
        ((), "1000000TiB", "977 PiB", "everybody on this machine, without a token"),
        (("--token-file", "{file}"), "2GiB", "2 GiB", "with tokens of {file}"),
    ],
)
def test_serve_says_how_it_serves_and_stops_cleanly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], capacity: str, shown: str, access: str
) -> None:
    """It makes its directory, for its user alone, and warns of a capacity that the disk does not have, and of a token
    that others may read."""
    root, file = tmp_path / "new" / "store", tmp_path / "tokens"
    file.write_text("secret\n")
    file.chmod(0o644)
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    given = [arg.format(file=file) for arg in args]
    with StoreProcess(root, extra_args=("--capacity", capacity, *given)) as store:
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        assert "no segments" in kvfetch("inspect", store.url, "--token-file", str(file)).stdout
        assert store.stop(signal.SIGINT if args else signal.SIGTERM) == 0
        log = store.log()
    *warned, listening, how, _ = (line for line in log.splitlines() if "more than the disk's" not in line)
    found = re.fullmatch(LISTENING, listening)
    assert found, log
    assert (found["root"], found["url"].rpartition(":")[2]) == (str(root), str(store.port))
    assert f"version {__version__}; capacity: {shown}, on a disk of " in how
    assert how.endswith(f"free; access: {access.format(file=file)}")
    assert ("more than the disk's" in log) == (capacity == "1000000TiB")
    assert len(warned) == ("{file}" in args)
    assert all(re.match(f"{TIME} WARNING kvfetch: all users of this machine may read", line) for line in warned)
    assert "secret" not in how
