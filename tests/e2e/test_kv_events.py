"""What SGLang's KV events tell routers of what is fetched (docs/stores.md)."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq

from harness.metrics import written
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.e2e.conftest import Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


class Events:
    """Subscribes to a server's KV events."""

    def __init__(self, endpoint: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint)
        self._seen: list[dict[str, Any]] = []

    def arrived(self) -> list[dict[str, Any]]:
        """Return all events until now, in their order."""
        while self._socket.poll(100):
            _, _, payload = self._socket.recv_multipart()
            self._seen += msgspec.msgpack.decode(payload)[1]
        return self._seen

    def stored_after_the_last_flush(self) -> dict[str, list[int]]:
        """Return the tokens that were stored, in their order, by medium."""
        found: dict[str, list[int]] = {}
        for event in self.arrived():
            if event["type"] == "AllBlocksCleared":
                found = {}
            elif event["type"] == "BlockStored":
                found.setdefault(event["medium"], []).extend(event["token_ids"])
        return found

    def close(self) -> None:
        self._socket.close(0)


@pytest.mark.parametrize(("mode", "media"), [("host", {"CPU_PINNED", "GPU"}), ("device", {"GPU"})])
def test_kv_events_say_what_is_fetched(
    mode: str, media: set[str], store: StoreProcess, expected: Expected, request: pytest.FixtureRequest
) -> None:
    """A router that follows them knows that the server has the prefix now, and in which memory."""
    shared: Shared = request.getfixturevalue(mode)
    prompt = make_prompt(2)
    with shared.attached(store.url) as server, closing(Events(shared.events_url)) as events:
        for number in range(100):  # the first events are lost until the subscription has reached the server
            if events.arrived():
                break
            ask(server, make_prompt(1000 + number, 32))
        with written(server, PAGES):
            ask(server, prompt)
        server.flush()
        answer = ask(server, prompt)
        fetched = from_storage(answer)
        assert fetched >= 0.9 * len(prompt)
        assert same_answer(answer, expected[2])

        def has_all() -> bool:
            stored = events.stored_after_the_last_flush()
            return all(prompt[:fetched] == stored.get(medium, [])[:fetched] for medium in media)

        wait_until(has_all, found=lambda: {k: len(v) for k, v in events.stored_after_the_last_flush().items()})
        assert set(events.stored_after_the_last_flush()) == media
