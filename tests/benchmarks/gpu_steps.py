"""Steps that end in every way."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.gpu_check.record import Record, SkippedError


def passes(record: Record) -> None:
    record.row("numbers", name="one", value=1.23456)
    record.row("numbers", name="two", value=2, more="a|b")
    record.note("a goal was missed")


def skips(record: Record) -> None:
    raise SkippedError("nothing to see")


def lacks(record: Record) -> None:
    import a_module_that_nobody_has  # noqa: F401


def fails_twice(record: Record) -> None:
    record.fail("first")
    record.fail("second")


def raises(record: Record) -> None:
    record.row("numbers", name="one")
    raise ValueError("no\nmore")


def crashes(record: Record) -> None:
    record.row("numbers", name="one")
    record.fail("before")
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(record: Record) -> None:
    record.row("numbers", name="one")
    child = subprocess.Popen(["sleep", "60"])
    Path(os.environ["CHILD"]).write_text(str(child.pid))
    time.sleep(60)


def needs_ours(record: Record) -> None:
    import sgl_kvfetch.no_such_module  # type: ignore[import-not-found]  # noqa: F401
