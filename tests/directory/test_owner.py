from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.small_segments import make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.notes import Pin, put_pin

SEGMENT = make_segment(page_hashes(4), 0, 4)


async def test_a_directory_belongs_to_one_store(tmp_path: Path) -> None:
    """And to the next one from the moment at which the first is closed."""
    first, other = LocalStore(tmp_path), LocalStore(tmp_path)
    await put_segment(first, SEGMENT)
    has_it = f"process {os.getpid()} has {tmp_path}: wait for its end; to share the directory, run `kvfetch serve "
    for use in (other.usage, lambda: other.get(SEGMENT.data_name), lambda: put_segment(other, SEGMENT)):
        with pytest.raises(StoreError, match=re.escape(has_it)):
            await use()
    first.owner.say_url("http://127.0.0.1:8700")
    with pytest.raises(StoreError, match=r"serves .*: use http://127\.0\.0\.1:8700 instead"):
        await other.usage()
    await put_segment(first, SEGMENT)
    await first.close()
    assert (await other.usage()).num_segments == 1
    await other.close()


async def test_a_store_has_its_directory_from_the_moment_at_which_it_creates_it(tmp_path: Path) -> None:
    pin = Pin("pin", 1, b"x" * 32)
    for folder, write in (
        ("segment", lambda store: put_segment(store, SEGMENT)),
        ("note", lambda store: put_pin(store, pin)),
    ):
        first, other = LocalStore(tmp_path / folder), LocalStore(tmp_path / folder)
        assert (await first.usage()).num_segments == 0
        await write(first)
        with pytest.raises(StoreError, match="has "):
            await other.usage()
        await first.close()
        await other.close()


@pytest.mark.process
def test_commands_and_servers_name_the_url_of_a_directory_that_is_served(tmp_path: Path) -> None:
    def run(*command: str) -> tuple[int, str]:
        args = [sys.executable, "-m", "sgl_kvfetch.tools", *command]
        done = subprocess.run(args, capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    with StoreProcess(tmp_path) as store:
        for command in (("inspect", str(tmp_path)), ("serve", str(tmp_path), "--port", "0")):
            code, said = run(*command)
            assert code != 0
            assert f"process {store.pid} serves {tmp_path}: use {store.url} instead" in said
        store.kill()
        assert run("verify", str(tmp_path))[0] == 0
        store.start()
    assert not (tmp_path / ".served").exists()
