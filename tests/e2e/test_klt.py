"""The quantiser ``klt``, from calibration on the command line to the answers of real SGLang."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.attaching import attach
from harness.engine import ServerError, SGLangServer, hicache_args
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess
from harness.waiting import wait_until
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.prompts import NUM_WINDOWS
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt
from tests.e2e.continuation import continue_by_layers
from tests.e2e.faults import PAGES
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@dataclass(frozen=True)
class Published:
    """A store with a token, and in it a profile that is encrypted with the key of its servers."""

    store: StoreProcess
    profile: Path  # a copy of the file
    keys: dict[str, Any]  # of a server's config


@pytest.fixture(scope="module")
def published(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    folder = tmp_path_factory.mktemp("profile")
    words = (f"w{token}" for seed in range(100, 106) for token in make_prompt(seed))
    for name, content in (("text", " ".join(words)), ("token", "secret"), ("key", "6b" * 32)):
        (folder / name).write_text(content)
        (folder / name).chmod(0o600)
    with StoreProcess(folder / "store", extra_args=("--token-file", str(folder / "token"))) as store:
        command = [sys.executable, "-m", "sgl_kvfetch.tools", "calibrate", "--model", str(model), "--text", "text"]
        command += ["--windows", "6", "--context", "512", "--continuation", "128", "--tp-size", "2", "--out", "profile"]
        command += ["--publish", store.url, "--token-file", "token", "--key-file", "key"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "target_kl" in done.stdout
        keys = {"quantiser": "klt", "token_file": str(folder / "token"), "key_file": str(folder / "key")}
        yield Published(store, folder / "profile", keys)


def test_sglang_goes_on_from_what_the_quantiser_restores(model: Path, host: Shared, published: Published) -> None:
    """As transformers does from the same KV, quantised in memory; see ``test_round_trip.test_quantised``. Positions
    are at stake here: the second half of the prompt is written by itself, and stands where it stood. It is stored in
    levels, all of which are read. The server finds its profile in the store."""
    calibrated, store = load_profile(published.profile), published.store
    target_kl = calibrated.curve[1].kl  # a step that shows, and of which a few more do not matter
    quantiser = KltQuantiser(calibrated, target_kl)
    config = published.keys | {"target_kl": target_kl}
    prompt = make_prompt(0)
    with host.attached(store.url, **config, levels={"count": 3}) as server:
        (said,) = [line for line in server.log().splitlines() if f"profile {calibrated.digest}" in line]
        assert f"of 'model' from {store.url}, the newest of its weights" in said
        ask(server, prompt[:320])
        wait_until_written(server, PAGES // 2)
        computed = ask(server, prompt)
        assert from_storage(computed) == 0
        wait_until_written(server, PAGES)
        server.flush()
        answer = ask(server, prompt)
        metrics = server.metrics()
    num_cached = from_storage(answer)
    assert num_cached >= 0.9 * 640
    tokens, logprobs = continue_by_layers(model, prompt, num_cached, quantiser, answer.output_ids)
    assert answer.output_ids == tokens
    # A coefficient halfway between two integers may become the other one, if sums are taken in another order.
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-4)  # it was quantised
    assert read_metric(metrics, "sgl_kvfetch_misses_total") == 0
    cells = [read_metric(metrics, "sgl_kvfetch_read_cells_total", coarseness=lost) for lost in ("0", "1")]
    assert cells[0] > cells[1] == 0


def test_a_model_without_a_profile_is_told_how_to_make_one(
    other: Shared, other_model: Path, published: Published
) -> None:
    """The store has one of other weights under the same name."""
    wanted = f"kvfetch calibrate --model {other_model} --text FILE --publish {published.store.url}"
    with other.detached() as server, pytest.raises(ServerError, match=re.escape(wanted)) as refused:
        attach(server, published.store.url, **published.keys)
    assert f"has none that can be used for the weights {fingerprint_model(str(other_model))}" in str(refused.value)


NUM_RANKS = 2
_WRITTEN = "sgl_kvfetch_written_pages_total"


def test_a_server_makes_its_own_profile(tmp_path: Path, store: StoreProcess) -> None:
    """Its two ranks go over to it while they serve. The first half of a prompt that is asked for afterwards was stored
    by ``exact``, and is still in SGLang's caches: it is stored once more. Each rank has half of the cells; together
    they restore what one quantiser of all cells does, in memory."""
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
    tokens, logprobs = continue_by_layers(model, prompt, num_cached, quantiser, answer.output_ids)
    assert answer.output_ids == tokens
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-5)  # it was quantised
