from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import backends
from benchmarks.backends import FileStorage, KVFetchStorage, NoStorage, wait_until_settled
from benchmarks.contention import CpuUse, other_cores
from benchmarks.stats import Traffic

METRICS = """\
# TYPE sgl_kvfetch_wire_bytes_total counter
sgl_kvfetch_wire_bytes_total{{direction="read"}} {wire}.0
sgl_kvfetch_wire_bytes_total{{direction="write"}} 7.0
# TYPE sgl_kvfetch_raw_bytes_total counter
sgl_kvfetch_raw_bytes_total{{direction="read"}} {raw}.0
# TYPE sgl_kvfetch_queued_bytes gauge
sgl_kvfetch_queued_bytes{{queue="write"}} {queued}.0
# TYPE sgl_kvfetch_written_pages_total counter
sgl_kvfetch_written_pages_total{{result="stored"}} {pages}.0
"""


def _metrics(wire: int = 0, raw: int = 0, queued: int = 0, pages: int = 0) -> str:
    return METRICS.format(wire=wire, raw=raw, queued=queued, pages=pages)


class FakeServer:
    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts

    def metrics(self) -> str:
        return next(self._texts)


def test_bytes_read() -> None:
    assert NoStorage().read("", "", 0, 16) == Traffic(0, 0)
    ours = KVFetchStorage("http://store:1", {"codec": "zstd"})
    assert ours.read(_metrics(100, 300), _metrics(600, 1300), 64, 16) == Traffic(500, 1000)
    assert "codec zstd" in ours.description


def test_bytes_of_raw_pages(tmp_path: Path) -> None:
    backend = FileStorage(tmp_path)
    assert backend.read("", "", 0, 16) == Traffic(0, 0)
    for page in ("aa", "bb", "cc"):
        for rank in (0, 1):
            (tmp_path / f"{page}_model_{rank}_2.bin").write_bytes(bytes(1000))
    assert backend.read("", "", 5 * 16, 16) == Traffic(10_000, 10_000)
    assert backend.stored("", "") == {"wire_bytes": 6000, "raw_bytes": 6000}


def test_waits_until_nothing_is_written_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_POLL_S", 0.01)
    monkeypatch.setattr(backends, "_QUIET_S", 0.05)
    seen: list[Hashable] = []

    def texts() -> Iterator[str]:
        for text in (_metrics(), _metrics(queued=9), _metrics(pages=4), _metrics(queued=5, pages=4)):
            seen.append(text)
            yield text
        while True:
            yield _metrics(pages=9)

    server: Any = FakeServer(texts())
    assert wait_until_settled(KVFetchStorage("http://store:1", {}), server) > 0
    assert len(seen) == 4
    monkeypatch.setattr(backends, "_SETTLE_S", 0.1)
    stuck: Any = FakeServer(iter(lambda: _metrics(queued=1), None))
    with pytest.raises(TimeoutError, match=r"the writes of kvfetch have not ended after 0\.1 s"):
        wait_until_settled(KVFetchStorage("http://store:1", {}), stuck)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_our_own_children_are_not_others() -> None:
    spin = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(spin) as child:
        before = CpuUse.now()
        time.sleep(1.0)
        after = CpuUse.now()
        child.kill()
    assert before is not None
    assert after is not None
    assert after.ours_s - before.ours_s > 0.1
    others = other_cores(before, after)
    assert others is not None
    # All that ran meanwhile is the child's and others'; ticks of 10 ms are as exact as it gets.
    assert others == pytest.approx((after.all_s - before.all_s) - (after.ours_s - before.ours_s), abs=0.1)
    assert other_cores(None, after) is None
