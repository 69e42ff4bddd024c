"""Why a request got less than is stored is noted for that request alone, whichever of its tasks finds out. What ails
the store is told once, with what to do, and so is its end."""

from __future__ import annotations

import asyncio
import logging

import pytest

from harness.metrics import own_metric
from sgl_kvfetch import log, metrics
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.metrics import count_miss, counted, miss, reasons_here, record_reason, record_success
from sgl_kvfetch.reasons import ADVICE, Reason
from tests.plane.fetch.test_link import Clock
from tests.reasons import assert_counted


def test_each_request_has_its_own_reasons() -> None:
    async def serve(reason: str, both_begun: asyncio.Barrier) -> list[str]:
        reasons = reasons_here()
        await both_begun.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(miss, "fetch", reason))
        record_reason("sooner")
        return reasons

    async def run() -> list[list[str]]:
        barrier = asyncio.Barrier(2)
        return list(await asyncio.gather(*(asyncio.create_task(serve(each, barrier)) for each in ("late", "timeout"))))

    before = own_metric("sgl_kvfetch_misses_total", stage="fetch", reason="late")
    assert asyncio.run(run()) == [["late", "sooner"], ["timeout", "sooner"]]
    assert own_metric("sgl_kvfetch_misses_total", stage="fetch", reason="late") == before + 1
    record_reason("nobody's")


async def test_a_bug_is_a_miss_and_what_is_cancelled_ends() -> None:
    async def fetch() -> None:
        with counted("fetch"):
            await asyncio.Event().wait()
        pytest.fail("it goes on with the next side pool")

    with assert_counted("fetch", Reason.INTERNAL), counted("fetch"):
        raise ZeroDivisionError
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fetch(), 0.01)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Clock:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(metrics, "_store", log.Troubles(metrics.logger, "the store"))
    monkeypatch.setattr(log, "time", clock := Clock())
    return clock


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def killed(stage: str) -> None:
    count_miss(stage, StoreError("refused", "no connection to store:8700: Connection refused", retriable=True))


def test_a_killed_store_is_told_once_and_so_is_its_return(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Lookups, fetches, writes and skipped lookups have one cause."""
    for stage in ("lookup", "fetch", "write", "lookup"):
        killed(stage)
        clock.now_s += 1
    count_miss("lookup", StoreError("skipped", "lookups are paused"))
    [(level, message)] = told(caplog)
    assert level == "WARNING"
    assert "Connection refused" in message
    assert message.endswith(ADVICE[Reason.REFUSED])
    clock.now_s += 600
    killed("lookup")
    record_success("fetch")  # from memory, perhaps
    record_success("lookup")
    [(level, message), back] = told(caplog)
    assert level == "WARNING"
    assert message.endswith("(5 times since it began)")
    assert back == ("INFO", "kvfetch: the store works again after 604 s (refused, 5 times)")
    # What comes and goes is told once a minute.
    for _ in range(10):
        killed("lookup")
        record_success("lookup")
    assert not told(caplog)
    clock.now_s += 61
    killed("write")
    assert [level for level, _ in told(caplog)] == ["WARNING"]


def test_a_token_that_may_only_read_is_no_better_when_lookups_work(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    count_miss("write", StoreError("unauthorised", "status 403"))
    record_success("lookup")
    assert [level for level, _ in told(caplog)] == ["WARNING"]
    record_success("write")
    assert [level for level, _ in told(caplog)] == ["INFO"]
