from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from harness.store_process import StoreProcess


def use_a_store_that_is_killed(directory: Path) -> None:
    with StoreProcess(directory) as store:
        os.kill(store.pid, signal.SIGKILL)
        os.waitid(os.P_PID, store.pid, os.WEXITED | os.WNOWAIT)


def test_a_store_that_ends_by_itself_fails_its_test(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"ended by itself with code -9:\nkvfetch: serving "):
        use_a_store_that_is_killed(tmp_path)
