"""A real SGLang with our backend behind its host pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.attaching import attach, detach
from harness.engine import Generation, ServerError, SGLangServer, hicache_args
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from tests.e2e.conftest import from_storage, make_prompt
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PROMPT = make_prompt(1)
CACHED_TOKENS = 624  # whole pages of the prompt less its last token, which is always computed


def _attach(server: SGLangServer, store: str, **config: Any) -> str:
    return attach(server, store, policy="wait_complete", **config)


def _hit_after_flush(server: SGLangServer) -> Generation:
    """Generate from an emptied cache until the store has the whole prompt: writes take a moment."""
    last: list[Generation] = []

    def is_stored() -> bool:
        server.flush()
        last.append(server.generate(input_ids=PROMPT))
        return from_storage(last[-1]) == CACHED_TOKENS

    wait_until(is_stored, poll_s=0.1)
    return last[-1]


def test_attached_at_run_time_and_read_by_another_server_until_its_weights_change(
    model: Path, other_model: Path, host: Shared, store: StoreProcess, tmp_path: Path
) -> None:
    with host.detached() as server:
        with pytest.raises(ServerError, match=r"status 400[\s\S]*codek"):
            _attach(server, store.url, codek="hevc")
        computed = server.generate(input_ids=PROMPT)
        assert computed.cached_tokens == 0
        server.flush()
        assert "attached" in _attach(server, store.url)
        assert _hit_after_flush(server).output_ids == computed.output_ids
        assert "detached" in detach(server)
        server.flush()
        assert server.generate(input_ids=PROMPT).cached_tokens == 0

    # A server of its own, since its weights are changed, with flags that change no values.
    layout = "--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"
    args = [*hicache_args(store.url), *layout]
    args += ["--context-length", "1024", "--trust-remote-code", "--load-format", "safetensors"]
    args += ["--model-loader-extra-config", '{"enable_multithread_load": false}']
    with SGLangServer(model, extra_args=args, admin_api_key="admin") as server:
        fetched = server.generate(input_ids=PROMPT)
        assert from_storage(fetched) == CACHED_TOKENS
        assert fetched.output_ids == computed.output_ids

        # Updates that SGLang refuses before it changes a weight.
        with pytest.raises(ServerError, match="status 400"):
            server.request("POST", "/update_weights_from_disk", {"model_path": str(tmp_path / "nowhere")})
        with pytest.raises(ServerError, match=r"status 400[\s\S]*no weight-update session"):
            server.request("POST", "/end_weight_update", {})
        assert _hit_after_flush(server).output_ids == computed.output_ids
        assert "the model's weights change" not in server.log()
        _new_weights_are_never_served_pages_of_old_ones(server, str(other_model), store.url, computed)


def _new_weights_are_never_served_pages_of_old_ones(
    server: SGLangServer, other: str, store_url: str, old: Generation
) -> None:
    server.request("POST", "/update_weights_from_disk", {"model_path": other})
    new = server.generate(input_ids=PROMPT)
    assert new.output_ids != old.output_ids
    assert new.cached_tokens == 0
    server.flush()
    again = server.generate(input_ids=PROMPT)  # nor were the new weights' pages written under the old name
    assert (again.cached_tokens, again.output_ids) == (0, new.output_ids)
    assert server.log().count("the model's weights change (UpdateWeightFromDiskReqInput)") == 1

    assert "detached" in detach(server)
    with pytest.raises(ServerError, match=r"status 400[\s\S]*set model_id"):
        _attach(server, store_url)
    # What the tree holds now may be of any weights.
    server.request("POST", "/update_weights_from_disk", {"model_path": other, "flush_cache": False})
    with pytest.raises(ServerError, match=r"status 400[\s\S]*flush it"):
        _attach(server, store_url, model_id="other")
    server.flush()
    assert "attached" in _attach(server, store_url, model_id="other")
    server.flush()
    assert server.generate(input_ids=PROMPT).output_ids == new.output_ids
    assert _hit_after_flush(server).output_ids == new.output_ids
