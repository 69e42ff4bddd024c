"""``kvfetch why`` asks real servers: each reason that needs one, made on purpose, has its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.engine import SGLangServer
from harness.faults import Fault
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from tests.e2e.conftest import make_prompt
from tests.e2e.faults import DEADLINE_S, PAGES, Proxy, is_data
from tests.e2e.shared import Shared
from tests.tools.conftest import kvfetch, kvfetch_json

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

USABLE = PAGES - 1  # SGLang always computes the last token
CONFIG: dict[str, Any] = {"fetch_timeout_s": DEADLINE_S, "lookup_timeout_s": 1.0, "prefetch_threshold": 64}


@pytest.fixture
def link(store: StoreProcess) -> Iterator[Proxy]:
    proxy = Proxy(store)
    yield proxy
    proxy.close()


def send(server: SGLangServer, seed: int, rid: str) -> None:
    """Send a prompt that is not in the server's memory."""
    server.flush()
    sampling = {"max_new_tokens": 1, "temperature": 0.0}
    server.request("POST", "/generate", {"input_ids": make_prompt(seed), "rid": rid, "sampling_params": sampling})


def store_prompt(server: SGLangServer, seed: int) -> None:
    send(server, seed, f"writes {seed}")
    wait_until_written(server, PAGES)


def why(store: StoreProcess, server: SGLangServer, seed: int, exit_code: int = 1, tokens: int = 640) -> Any:
    prompt = str(make_prompt(seed)[:tokens])
    return kvfetch_json("why", store.url, "--server", server.url, "--prompt", prompt, exit_code=exit_code)[0]


def why_request(store: StoreProcess, server: SGLangServer, rid: str, exit_code: int = 1) -> Any:
    return kvfetch_json("why", store.url, "--server", server.url, "--request", rid, exit_code=exit_code)[0]


def reasons(found: Any) -> list[str]:
    return [each["reason"] for each in found["findings"]]


def test_what_became_of_requests(device: Shared, store: StoreProcess, link: Proxy) -> None:
    with device.attached(link.url, **CONFIG) as server:
        assert reasons(why(store, server, 0)) == ["never_written"]
        store_prompt(server, 0)
        found = why(store, server, 0, exit_code=0)
        assert (found["num_pages"], found["stored_pages"], found["page_size"]) == (PAGES, PAGES, 16)
        send(server, 0, "served")
        (decided,) = why_request(store, server, "served", exit_code=0)["decided"]
        counts = [decided[f"num_{what}"] for what in ("pages", "found", "served")]
        assert (counts, decided["reason"]) == ([USABLE] * 3, "")

        send(server, 1, "new")
        assert reasons(why_request(store, server, "new")) == ["never_written"]
        assert reasons(why(store, server, 0, tokens=64)) == ["short"]

        link.set(Fault("hang", only=is_data))
        send(server, 0, "hangs")
        assert reasons(why_request(store, server, "hangs")) == ["timeout"]
        link.set(Fault("flip", after_bytes=500, only=is_data))
        send(server, 0, "flips")
        assert reasons(why_request(store, server, "flips")) == ["corrupt"]
        link.set(Fault("refuse"))
        rids: list[str] = []

        def is_paused() -> bool:
            rids.append(f"refused {len(rids)}")
            send(server, 0, rids[-1])
            return reasons(why_request(store, server, rids[-1])) == ["skipped"]

        wait_until(is_paused)
        assert reasons(why(store, server, 0)) == ["skipped"]
        assert kvfetch("clear", store.url, "--yes").exit_code == 0
        assert "evicted" in reasons(why(store, server, 0))


def test_servers_that_share_nothing(device: Shared, store: StoreProcess) -> None:
    with device.attached(store.url, quantiser="uint8", **CONFIG) as server:
        store_prompt(server, 2)
    with device.attached(store.url, **CONFIG) as server:
        found = why(store, server, 2)
        assert reasons(found) == ["other_quantiser"]
        assert "uint8" in found["findings"][0]["detail"]
    with device.attached(store.url, model_id="named", quantiser="uint8", **CONFIG) as server:
        found = why(store, server, 2)
        assert reasons(found) == ["other_weights"]
        assert "the server's 'id:named'" in found["findings"][0]["detail"]
    with device.attached(store.url, quantiser="uint8", mode="write_only", **CONFIG) as server:
        assert reasons(why(store, server, 2)) == ["not_reading"]
    with device.detached() as server:
        assert reasons(why(store, server, 2)) == ["not_attached"]


def test_a_prompt_that_is_computed_sooner(device: Shared, store: StoreProcess, link: Proxy) -> None:
    with device.attached(link.url, **CONFIG | {"recompute": "auto", "fetch_timeout_s": WAIT_S}) as server:
        store_prompt(server, 3)
        link.set(Fault("slow", bytes_per_s=2e3, only=is_data))
        rids: list[str] = []

        def is_computed() -> bool:
            """The first of them measure the link."""
            rids.append(f"slow {len(rids)}")
            send(server, 3, rids[-1])
            return reasons(why_request(store, server, rids[-1])) == ["sooner"]

        wait_until(is_computed, found=lambda: f"{why(store, server, 3)}")
        assert reasons(why(store, server, 3)) == ["sooner"]
        link.set(None)


def test_host_mode(host: Shared, store: StoreProcess, link: Proxy, tmp_path: Path) -> None:
    with host.attached(link.url, **CONFIG) as server:
        store_prompt(server, 4)
        send(server, 4, "served")
        found = why(store, server, 4, exit_code=0)
        decided = found["decided"][-1]
        assert (decided["request_id"], decided["num_found"], decided["num_served"]) == ("", USABLE, USABLE)
        link.set(Fault("flip", after_bytes=500, only=is_data))
        send(server, 4, "flips")
        assert reasons(why(store, server, 4)) == ["corrupt"]
        link.set(Fault("refuse"))

        def is_paused() -> bool:
            send(server, 4, "refused")
            return "skipped" in reasons(why(store, server, 4))

        wait_until(is_paused)
        refused = kvfetch("why", store.url, "--server", server.url, "--request", "served")
        assert "in host mode, SGLang does not tell request ids" in refused.output
