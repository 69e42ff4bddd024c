"""What device mode through the linker records of a fetch for the timeline and for traces."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context
from sglang.srt.observability.trace import TraceNullContext

from sgl_kvfetch.plugin.linker.scheduler_hooks import _arrive
from tests.plugin.device.rig import prompt
from tests.plugin.device.test_spans import Kept, assert_stages_of_a_fetch, kept
from tests.plugin.linker.conftest import MakeRig
from tests.plugin.linker.rig import Request

__all__ = ["kept"]

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_stages_of_a_fetch(make: MakeRig, kept: Kept) -> None:
    rig, tokens = make(), prompt(0)
    rig.stored(tokens)
    request = rig.arrive(tokens)
    rig.await_unparked(request)
    assert rig.admit(request) == [32]
    kept.await_end(request.rid)
    assert_stages_of_a_fetch(kept.of(request.rid))


@pytest.mark.parametrize("end", ["missed", "aborted"])
def test_a_request_without_stored_pages(make: MakeRig, kept: Kept, end: str) -> None:
    rig = make()
    rig.store.lookups.is_open = end == "missed"
    request = rig.arrive(prompt(0))
    if end == "missed":
        rig.await_unparked(request)
    rig.linker.leave(request)
    rig.store.lookups.is_open = True
    kept.await_end(request.rid)
    assert kept.of(request.rid)["parked"].attributes == {"end": end, "tokens": 0}
    rig.assert_nothing_held()


def test_a_fetch_belongs_to_sglangs_span_of_its_request(make: MakeRig, kept: Kept) -> None:
    rig = make()
    span = NonRecordingSpan(SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1)))
    traced = SimpleNamespace(tracing_enable=True, root_span_context=set_span_in_context(span))
    scheduler: Any = SimpleNamespace(tree_cache=rig.cache, waiting_queue=[], schedule_low_priority_values_first=False)
    requests = [Request(f"r{seed}", [*prompt(seed), 1]) for seed in range(2)]
    for request, context in zip(requests, (traced, TraceNullContext()), strict=True):
        request.time_stats = SimpleNamespace(trace_ctx=context)
        _arrive(scheduler, rig.linker, request)
    rig.await_unparked(*requests)
    kept.await_end(requests[1].rid)
    timelines = [kept.of(request.rid)["parked"].request for request in requests]
    child, own = timelines
    assert child.traceparent.startswith(f"00-{0xABC:032x}-")
    assert child.parent_id == 0xDEF
    assert own.traceparent.startswith("00-")
    assert own.parent_id == 0
