"""Steps that end in every way."""

from __future__ import annotations

import os
import signal

from benchmarks.gpu_check.record import Record, SkippedError
from harness.waiting import wait_until


def passes(record: Record) -> None:
    record.row("numbers", name="one", value=1.23456)
    record.row("numbers", name="two", value=2, more="a|b")
    record.note("a goal was missed")


def skips(record: Record) -> None:
    raise SkippedError("nothing to see")


def fails_twice(record: Record) -> None:
    record.fail("first")
    record.fail("second")


def crashes(record: Record) -> None:
    record.row("numbers", name="one")
    record.fail("before")
    os.kill(os.getpid(), signal.SIGSEGV)


def waits(record: Record) -> None:
    record.row("numbers", name="one", limit_s=record.left_s)
    wait_until(record.path.with_name("seen").exists)
