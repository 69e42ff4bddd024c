"""``"quantiser": "auto"``: from an empty store to hits by ``klt``, with nobody doing anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.metrics import read_metric
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.prompts import NUM_WINDOWS
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt
from tests.e2e.continuation import continue_from_quantised

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

NUM_RANKS = 2

_WRITTEN = "sgl_kvfetch_written_pages_total"


def test_a_server_makes_its_own_profile(tmp_path: Path, store: StoreProcess) -> None:
    """Its two ranks go over to it while they serve. The first half of a prompt that is asked for afterwards was stored
    by ``exact``, and is still in SGLang's caches: it is stored once more. Then a second server, of one rank, hits."""
    model = make_tiny_llama(tmp_path / "model", num_layers=1, hidden_size=64, head_dim=32)
    target_kl = 0.05
    # The pool holds all prompts of the sample.
    flags = hicache_args(store.url, host_pool_gb=1, quantiser="auto", target_kl=target_kl)
    prompt = make_prompt(0)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with SGLangServer(model, extra_args=[*flags, "--tp-size", str(NUM_RANKS)], env=env) as server:
        ask(server, prompt[:320])
        for seed in range(1, NUM_WINDOWS + 1):
            ask(server, make_prompt(seed, 1600))
        log = server.log
        # All that is stored by `exact`: it must not count below.
        asked = NUM_RANKS * (320 + NUM_WINDOWS * 1600) // PAGE_SIZE
        wait_until(lambda: read_metric(server.metrics(), _WRITTEN) >= asked, poll_s=0.1, found=log)
        wait_until(lambda: "this server stores with 'klt' from now on" in log(), poll_s=0.1, found=log)
        for said in ("takes a sample", "the sample of prompts is complete", "calibrates model on its", "published"):
            assert log().count(f"{said}") == 1, said
        before = read_metric(server.metrics(), _WRITTEN)
        computed = ask(server, prompt)
        pages = NUM_RANKS * 640 // PAGE_SIZE
        wait_until(lambda: read_metric(server.metrics(), _WRITTEN) >= before + pages, poll_s=0.1, found=log)
        server.flush()
        answer = ask(server, prompt)
    assert from_storage(computed) == 0
    num_cached = from_storage(answer)
    assert num_cached >= 0.9 * 640
    (path,) = (tmp_path / "cache").glob("sgl_kvfetch/profiles/*/*")
    profile = load_profile(path)
    assert profile.calibration.weights == fingerprint_model(str(model))
    quantiser = KltQuantiser(profile, target_kl)
    tokens, logprobs = continue_from_quantised(model, prompt, num_cached, quantiser, len(answer.output_ids))
    assert answer.output_ids == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-5)  # it was quantised

    with SGLangServer(model, extra_args=flags, env={"XDG_CACHE_HOME": str(tmp_path / "other")}) as server:
        second = ask(server, prompt)
        assert f"profile {profile.digest}" in server.log()
    assert (from_storage(second), second.output_ids) == (num_cached, answer.output_ids)
