"""A model with MLA: every rank has the same latent vectors, so they are stored once, for servers of any size."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.engine import Generation, SGLangServer, device_args, host_tier_args
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_deepseek
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from tests.e2e.conftest import PAGE_SIZE, ask, from_storage, make_prompt, same_answer
from tests.e2e.continuation import continue_from_quantised
from tests.e2e.shared import Shared

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

PAGES = 640 // PAGE_SIZE
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_deepseek(tmp_path_factory.mktemp("deepseek"))


@pytest.fixture(scope="module")
def one_rank(deepseek: Path) -> Iterator[Shared]:
    """A server for host mode."""
    shared = Shared(deepseek, host_tier_args(), "wait_complete")
    yield shared
    shared.close()


def test_what_one_rank_stores_two_ranks_restore_and_the_other_way_round(
    deepseek: Path, one_rank: Shared, store: StoreProcess
) -> None:
    """Across modes, too."""
    with one_rank.attached(store.url) as server:
        computed = [_compute(server, 0)]
    flags = device_args(store.url)
    with SGLangServer(deepseek, extra_args=[*flags, "--tp-size", "2"], env=TWO_RANKS) as server:
        assert _is_restored(server, 0, computed[0])
        computed.append(_compute(server, 1))
        assert read_metric(server.metrics(), "sgl_kvfetch_written_pages_total", result="stored") == PAGES
        server.flush()
        assert _is_restored(server, 1, computed[1])
    with one_rank.attached(store.url) as server:
        assert _is_restored(server, 0, computed[0])
        assert _is_restored(server, 1, computed[1])


def _compute(server: SGLangServer, seed: int) -> Generation:
    answer = ask(server, make_prompt(seed))
    assert from_storage(answer) == 0
    wait_until_written(server, PAGES)
    return answer


def _is_restored(server: SGLangServer, seed: int, computed: Generation) -> bool:
    answer = ask(server, make_prompt(seed))
    return from_storage(answer) >= 0.9 * 640 and same_answer(answer, computed)


def test_sglang_goes_on_from_latent_vectors_that_klt_restores(
    deepseek: Path, one_rank: Shared, store: StoreProcess, tmp_path: Path
) -> None:
    """As transformers does from the same vectors, quantised in memory."""
    (tmp_path / "text").write_text(" ".join(f"w{token}" for seed in range(100, 106) for token in make_prompt(seed)))
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "calibrate", "--model", str(deepseek), "--text", "text"]
    command += ["--out", "profile", "--windows", "6", "--context", "512", "--continuation", "128"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    profile = load_profile(tmp_path / "profile")
    assert profile.rotations is not None
    target_kl = profile.curve[1].kl
    with one_rank.attached(store.url, profile=str(tmp_path / "profile"), target_kl=target_kl) as server:
        computed = _compute(server, 0)
        server.flush()
        answer = ask(server, make_prompt(0))
    assert from_storage(answer) >= 0.9 * 640
    assert answer.logprobs[0] != pytest.approx(computed.logprobs[0], abs=1e-5)  # quantising was at work
    quantiser = KltQuantiser(profile, target_kl)
    tokens, logprobs = continue_from_quantised(
        deepseek, make_prompt(0), from_storage(answer), quantiser, len(answer.output_ids)
    )
    assert answer.output_ids == tokens
    # A coefficient halfway between two integers may become the other one.
    assert answer.logprobs == pytest.approx(logprobs, abs=5e-3)
