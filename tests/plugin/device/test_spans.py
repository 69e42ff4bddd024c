"""What device mode records of a fetch for the timeline and for traces."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from harness.waiting import wait_until
from sgl_kvfetch import timeline
from sgl_kvfetch.timeline import Recorded
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import prompt

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass
class Kept:
    """Keeps the spans instead of exporting them."""

    spans: list[Recorded] = field(default_factory=list)

    def add(self, span: Recorded) -> None:
        self.spans.append(span)

    def close(self) -> None:
        pass

    def await_end(self, request_id: str) -> None:
        """Wait until the end of a request's fetch is recorded. The data plane's thread does that, after it has told."""
        wait_until(lambda: any(s.stage is None and s.request.id == request_id for s in list(self.spans)))

    def all_of(self, request_id: str) -> list[Recorded]:
        return [span for span in self.spans if span.request.id == request_id]

    def of(self, request_id: str) -> dict[str | None, Recorded]:
        """Return the last span of each stage of a request. None is the stage of the end of its fetch."""
        return {span.stage: span for span in self.all_of(request_id)}


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    kept = Kept()
    monkeypatch.setattr(timeline, "_process", kept)
    return kept


def assert_stages_of_a_fetch(spans: dict[str | None, Recorded]) -> None:
    """Of a prompt of 8 pages, which are all stored."""
    assert spans.keys() == {"lookup", "transmit", "decode", "restore", None, "parked"}
    assert len({span.request.traceparent for span in spans.values()}) == 1
    assert spans["lookup"].attributes == {"pages": 8, "found": 8}
    assert spans["parked"].attributes == {"end": "landed", "reason": "", "tokens": 32}
    assert spans["decode"].attributes["codec"] == "zstd"
    assert int(spans["transmit"].attributes["bytes"]) > 0
    assert spans["parked"].start_s <= spans["lookup"].start_s <= spans["lookup"].end_s <= spans["transmit"].start_s
    assert spans["restore"].end_s <= spans["parked"].end_s


def test_the_stages_of_a_fetch(make: MakeRig, kept: Kept) -> None:
    rig = make()
    tokens = rig.stored(prompt(0))
    request = rig.arrive_staged(tokens)
    assert rig.admit(request) == [32]
    kept.await_end(request.rid)
    assert_stages_of_a_fetch(kept.of(request.rid))


@pytest.mark.parametrize(("end", "reason"), [("missed", ""), ("aborted", "cancelled")])
def test_a_request_without_stored_pages(make: MakeRig, kept: Kept, end: str, reason: str) -> None:
    rig = make()
    rig.store.lookups.is_open = end == "missed"
    request = rig.arrive(prompt(0))
    if end == "missed":
        rig.await_unparked(request)
    else:
        wait_until(lambda: rig.store.lookups.num_waiting > 0)
    rig.linker.prefixes.leave(request.rid)
    rig.store.lookups.is_open = True
    kept.await_end(request.rid)
    assert kept.of(request.rid)["parked"].attributes == {"end": end, "reason": reason, "tokens": 0}
    rig.assert_nothing_held()
