"""A release of SGLang: what it stored comes back after a restart, and to servers of the environment's own release.

``scripts/test --sglang VERSION`` runs this file; the ordinary tests do the same and more with the environment's own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine import SGLangServer, device_args, hicache_args
from harness.metrics import wait_until_written
from harness.store_process import StoreProcess
from sgl_kvfetch.plugin.versions import installed_version
from tests.e2e.conftest import Expected, ask, from_storage, make_prompt, same_answer
from tests.e2e.faults import PAGES
from tests.linker import HAS_LINKER

pytestmark = pytest.mark.sglang


MODES = {"host": hicache_args} | ({"device": device_args} if HAS_LINKER else {})


@pytest.mark.parametrize("args", MODES.values(), ids=MODES)
def test_what_it_stored_comes_back(
    model: Path, store: StoreProcess, expected: Expected, args: Callable[[str], list[str]]
) -> None:
    flags = args(store.url)
    with SGLangServer(model, extra_args=flags) as writer:
        assert json.loads(writer.request("GET", "/server_info"))["version"] == installed_version()
        answer = ask(writer, make_prompt(0))
        assert from_storage(answer) == 0
        assert same_answer(answer, expected[0])
        wait_until_written(writer, PAGES)
    for path in (os.environ.get("PYTHONPATH", ""), ""):
        with SGLangServer(model, extra_args=flags, env={"PYTHONPATH": path}) as reader:
            answer = ask(reader, make_prompt(0))
            assert from_storage(answer) >= 0.9 * 640
            assert same_answer(answer, expected[0])
