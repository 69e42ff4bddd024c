"""Steps that end in every way."""

from __future__ import annotations

import os
import signal

from benchmarks.gpu_check.record import Record, SkippedError


def passes(record: Record) -> None:
    record.row("numbers", name="one", value=1.23456)


def skips(record: Record) -> None:
    raise SkippedError("nothing to see")


def crashes(record: Record) -> None:
    record.row("numbers", name="one")
    record.fail("before")
    os.kill(os.getpid(), signal.SIGSEGV)
