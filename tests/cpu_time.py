"""Measures the CPU time of tests, and of the processes that they start. It shows it at the end of a run, by folder, and
for the ten slowest files.

Elapsed time says little on a busy machine. Each test's figure is in its report, and so in pytest's `--junit-xml`. A
server that several tests share counts for each of them while it runs. Not counted are grandchildren that nobody waited
for, but for those of the servers of `harness.engine`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest

from harness.children import children_cpu_s

_PROPERTY = "cpu_s"
_SLOWEST_FILES = 10


def used_s() -> float:
    """Return the CPU seconds of this process and of its children."""
    return time.process_time() + children_cpu_s()


class CpuTime:
    """A plugin of pytest. With xdist, workers measure, and the process that they report to adds their figures."""

    def __init__(self) -> None:
        self._before_s = 0.0
        self._of_files: defaultdict[str, float] = defaultdict(float)
        self._of_workers_s = 0.0

    def pytest_collection_finish(self) -> None:
        self._before_s = used_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if call.when == "teardown":
            now_s = used_s()
            report.user_properties.append((_PROPERTY, round(now_s - self._before_s, 3)))
            self._before_s = now_s
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds: Any = dict(report.user_properties).get(_PROPERTY, 0.0)
        self._of_files[report.nodeid.split("::")[0]] += seconds

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if output := getattr(session.config, "workeroutput", None):
            output[_PROPERTY] = used_s()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._of_workers_s += getattr(node, "workeroutput", {}).get(_PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        all_s = self._of_workers_s + time.process_time() if self._of_workers_s else used_s()
        of_folders: defaultdict[str, float] = defaultdict(float)
        for file, seconds in self._of_files.items():
            of_folders["/".join(file.split("/")[:-1][:2])] += seconds
        rest_s = all_s - sum(of_folders.values())
        folders = [*_costliest_first(of_folders), f"imports and collecting {rest_s:.0f} s"]
        terminalreporter.write_line(f"CPU time: {all_s / 60:.1f} min ({', '.join(folders)})")
        slowest = _costliest_first(self._of_files)[:_SLOWEST_FILES]
        terminalreporter.write_line(f"slowest files: {', '.join(slowest)}")


def _costliest_first(seconds_of: dict[str, float]) -> list[str]:
    costliest_first = sorted(seconds_of.items(), key=lambda item: -item[1])
    return [f"{name} {seconds:.0f} s" for name, seconds in costliest_first]
