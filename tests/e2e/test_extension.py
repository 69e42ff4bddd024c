"""A codec and a quantiser that another package brings: examples/extension, in real servers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.engine import SGLangServer, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from tests.e2e.conftest import PAGE_SIZE, Expected, ask, from_storage, make_prompt
from tests.test_extending import install_example

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


def test_a_quantiser_and_a_codec_of_another_package(
    model: Path, store: StoreProcess, expected: Expected, tmp_path: Path
) -> None:
    env = {"PYTHONPATH": os.pathsep.join([str(install_example(tmp_path)), os.environ.get("PYTHONPATH", "")])}
    flags = hicache_args(store.url, quantiser="float8(e5m2)", codec="lzma")
    with SGLangServer(model, extra_args=flags, env=env, imports_itself=True) as server:
        ask(server, make_prompt(0))
        wait_until_written(server, 640 // PAGE_SIZE)
        server.flush()
        answer = ask(server, make_prompt(0))
    assert from_storage(answer) >= 0.9 * 640
    # A byte a value, with two bits of mantissa, changes the answer's first token by little.
    assert answer.logprobs[0] == pytest.approx(expected[0].logprobs[0], abs=1.0)
    assert answer.logprobs[0] != expected[0].logprobs[0]
