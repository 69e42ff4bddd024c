from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.small_segments import make_segment, page_hashes, put_segment
from harness.store_process import StoreProcess
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError

SEGMENT = make_segment(page_hashes(4), 0, 4)


async def test_a_directory_that_is_served_is_nobody_elses(tmp_path: Path) -> None:
    served, other = LocalStore(tmp_path), LocalStore(tmp_path)
    served.own()
    with pytest.raises(StoreError, match=r"other processes use .*: end them first"):
        await put_segment(other, SEGMENT)
    served.owner.say_url("http://127.0.0.1:8700")
    with pytest.raises(StoreError, match=r"serves .*: use http://127\.0\.0\.1:8700 instead"):
        await other.usage()
    await put_segment(served, SEGMENT)
    await served.close()
    assert (await other.usage()).num_segments == 1
    with pytest.raises(StoreError, match="other processes use"):
        LocalStore(tmp_path).own()
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
