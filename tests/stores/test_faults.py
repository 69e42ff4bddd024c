"""What goes wrong on the way to a store, by HTTP and in S3: why a call fails, what is tried again, and from where."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from harness.faults import Fault, FaultyProxy
from harness.reading import read_bytes
from harness.small_segments import FOLDER, data_object, page_hashes
from harness.waiting import WAIT_S
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores.base import Lookup
from tests.stores.conftest import MakeClient

pytestmark = pytest.mark.process

CONTENT = bytes(range(256)) * 4000
NAME = data_object(CONTENT)
FAULTS = [
    (Fault("refuse"), "refused", "http s3"),
    (Fault("hang"), "timeout", "http s3"),
    (Fault("stall", after_bytes=100), "timeout", "s3"),  # `test_stalls` has HTTP's
    (Fault("slow", bytes_per_s=1e5), "timeout", "http"),
    *((Fault("error", status=status), "server", "http s3") for status in (500, 503)),
    (Fault("error", status=429), "server", "s3"),
    (Fault("error", status=502), "proxy", "http s3"),
    (Fault("error", status=504), "proxy", "http"),
    *((Fault("error", status=status), "unauthorised", "http s3") for status in (401, 403)),
    (Fault("error", status=507), "full", "http s3"),
    (Fault("error", status=400), "invalid", "http s3"),
    *((Fault("error", status=status), "protocol", "http") for status in (302, 418, 204)),
    *((Fault("error", status=status), "protocol", "s3") for status in (301, 404)),  # 404 without S3's code: a proxy's
    (Fault("close", after_bytes=0), "truncated", "http"),
    (Fault("close", after_bytes=500), "truncated", "http s3"),
    (Fault("wrong_length", extra_bytes=10), "truncated", "http"),
    (Fault("garbage"), "protocol", "http s3"),
]
LASTING = ("unauthorised", "invalid", "protocol")


@pytest.fixture
async def make(make: MakeClient, link: FaultyProxy) -> MakeClient:
    """The store has an object."""
    await make().put(NAME, CONTENT)
    link.requests.clear()
    return make


async def reason_of(call: Awaitable[object]) -> tuple[str, bool]:
    with pytest.raises(StoreError) as caught:
        await asyncio.wait_for(call, WAIT_S)
    assert "\n" not in str(caught.value)
    return caught.value.reason, caught.value.retriable


@pytest.mark.parametrize(
    ("kind", "fault", "reason"),
    [
        pytest.param(kind, fault, reason, id=f"{kind}-{fault.kind}-{fault.status}-{fault.after_bytes}")
        for fault, reason, kinds in FAULTS
        for kind in kinds.split()
    ],
)
async def test_faults_have_reasons(kind: str, make: MakeClient, link: FaultyProxy, fault: Fault, reason: str) -> None:
    await link.set(fault)
    store = make(timeout_s=0.5 if reason == "timeout" else WAIT_S, max_attempts=2)
    for call in (store.get(NAME), store.get(NAME, 500, 200_000), read_bytes(store, NAME, 500, 200_000)):
        link.requests.clear()
        assert await reason_of(call) == (reason, reason not in LASTING)
        is_asked_once = reason in LASTING or (kind, reason) == ("http", "full")
        assert not is_asked_once or len(link.requests) == 1
    await link.set(None)
    assert await make().get(NAME) == CONTENT


@pytest.mark.parametrize(("fault", "reason"), [("refuse", "refused"), ("hang", "timeout"), ("error", "server")])
async def test_every_call_ends_by_the_deadline(make: MakeClient, link: FaultyProxy, fault: str, reason: str) -> None:
    await link.set(Fault(fault))  # type: ignore[arg-type]
    store = make(timeout_s=0.5 if reason == "timeout" else WAIT_S, max_attempts=2)
    for call in (
        store.put(NAME, CONTENT),
        store.head(NAME),
        store.delete(NAME),
        store.lookup(FOLDER, page_hashes(1)),
        anext(aiter(store.list())),
    ):
        assert (await reason_of(call))[0] == reason


PASSING = [
    *((kind, Fault("error", status=status, times=1)) for status in (500, 502, 503) for kind in ("http", "s3")),
    *((kind, Fault("close", after_bytes=10, times=1)) for kind in ("http", "s3")),
    ("http", Fault("wrong_length", extra_bytes=5, times=1)),
]


@pytest.mark.parametrize(("kind", "fault"), PASSING, ids=lambda x: x if isinstance(x, str) else f"{x.kind}-{x.status}")
async def test_what_passes_is_tried_again(kind: str, make: MakeClient, link: FaultyProxy, fault: Fault) -> None:
    retried: list[StoreError] = []
    store = make(on_retry=retried.append)

    async def names() -> list[str]:
        return [info.name async for info in store.list()]

    calls: list[tuple[Callable[[], Coroutine[Any, Any, object]], object]] = [
        (lambda: store.put(NAME, CONTENT), None),
        (lambda: store.get(NAME), CONTENT),
        (lambda: store.lookup(FOLDER, page_hashes(1)), Lookup(())),
        (names, [NAME]),
        (lambda: store.delete(NAME), True),
    ]
    for call, expected in calls if fault.kind == "error" else calls[1:2]:
        await link.set(fault)
        assert await call() == expected
    assert kind == "s3" or len(retried) == (5 if fault.kind == "error" else 1)  # obstore tells nobody
    assert await store.get(NAME) == (None if fault.kind == "error" else CONTENT)


async def test_a_broken_read_continues_where_it_ended(make: MakeClient, link: FaultyProxy) -> None:
    await link.set(Fault("close", after_bytes=400_000, times=1))
    assert await read_bytes(make(), NAME, 10, 900_000) == CONTENT[10:900_010]
    assert len(link.requests) == 2
