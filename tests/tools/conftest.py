"""A store's directory with a few small segments in it."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from harness.s3_server import S3Server, running_s3_server
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.tools.app import app
from sgl_kvfetch.user_files import TOKEN_ENV
from tests.segments import make_segment


@dataclass(frozen=True)
class Stored:
    root: Path
    segments: tuple[CodedSegment, ...]  # two of the exact quantiser's namespace, one of uint8's

    @property
    def url(self) -> str:
        return self.root.as_uri()

    def manifest_path(self, index: int) -> Path:
        return self.root / self.segments[index].manifest.key.manifest_name

    def data_path(self, index: int) -> Path:
        return self.root / self.segments[index].data_name


KEYS = StoreKeys(b"k" * 32)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """The file that holds the key of ``KEYS``."""
    path = tmp_path / "key"
    path.write_text("6b" * 32)
    return path


def put(root: Path, segment: CodedSegment) -> None:
    """Write a segment's files, whatever they hold."""
    for name, content in (*segment.data_objects(), (segment.manifest.key.manifest_name, segment.manifest.encode())):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def flip(path: Path, place: int) -> None:
    """Change a bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


@pytest.fixture(scope="session")
def coded() -> tuple[CodedSegment, ...]:
    return (
        make_segment(num_pages=4, codec="hevc")[0],
        make_segment(num_pages=1, codec="zstd", first_page=4)[0],
        make_segment(num_pages=2, codec="hevc420", quantiser=make_quantiser("uint8"), span_pages=1)[0],
    )


@pytest.fixture
def stored(tmp_path: Path, coded: tuple[CodedSegment, ...]) -> Stored:
    root = tmp_path / "store"
    for segment in coded:
        put(root, segment)
    return Stored(root, coded)


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_ENV, raising=False)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server with one bucket, which the environment leads to."""
    with running_s3_server() as server:
        for key, value in server.config.items():
            monkeypatch.setenv(f"AWS_{key.upper()}", value)
        yield server


def kvfetch(*args: str) -> Result:
    """Run the command in this process. Only domain errors are caught: others fail the test here."""
    handlers, level = logging.root.handlers[:], logging.root.level
    result = CliRunner().invoke(app, list(args))
    # A command that set up logging has left a handler behind that writes to the runner's closed output.
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def said(*args: str, exit_code: int = 0) -> str:
    result = kvfetch(*args)
    assert result.exit_code == exit_code, result.output
    return result.output


def kvfetch_json(*args: str, exit_code: int = 0) -> Any:
    """Run the command with ``--json``, and return what it prints. Its help names all fields of that."""
    result = kvfetch(*args, "--json")
    assert result.exit_code == exit_code, result.output
    found = json.loads(result.stdout)
    told = set(re.findall(r"[a-z0-9_]+", _help(args[0])))
    for each in found if isinstance(found, list) else [found]:
        assert each.keys() <= told
    return found


@functools.cache
def _help(command: str) -> str:
    return kvfetch(command, "--help").stdout


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    """Nothing in the directory is written by what runs inside."""
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    yield
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
