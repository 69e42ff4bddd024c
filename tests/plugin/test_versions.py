"""Each supported release of SGLang, and what we make up for in the older one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from sglang.srt.mem_cache import hicache_storage

from harness.beside import environment
from harness.sglang_beside import install_sglang_beside
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.seams import SEAMS, Seam
from sgl_kvfetch.plugin.versions import (
    NEWEST,
    SGLANG_VERSIONS,
    announce_pools,
    budget_pages,
    dcp_size,
    fence_writes,
    installed_version,
    is_deadline_expired,
    require_distinct_images,
    table_version,
    wait_for_layers,
)
from sglang_on_cpu.seams import SEAMS as CPU_SEAMS
from tests.plugin.sglang_places import PLACES, Place

TABLES = (*SEAMS, *CPU_SEAMS)
COUNT = """
from sgl_kvfetch.plugin.seams import SEAMS, installed_seams
from sglang_on_cpu.seams import SEAMS as CPU_SEAMS
print(len(installed_seams([*SEAMS, *CPU_SEAMS])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", [version for version in SGLANG_VERSIONS if version != installed_version()])
def test_the_other_release_matches_the_tables(version: str) -> None:
    try:
        folder = install_sglang_beside(version)
    except RuntimeError as error:
        pytest.skip(str(error))
    run(["pytest", "-q", "-p", "no:cacheprovider", "tests/plugin/test_sglang.py"], folder)


@pytest.mark.slow
@pytest.mark.skipif(installed_version() != NEWEST, reason=f"the patches are for {NEWEST}")
def test_our_patches_apply_and_take_the_place_of_hooks() -> None:
    folder = install_sglang_beside("patched")
    run(["pytest", "-q", "-p", "no:cacheprovider", "tests/plugin/test_sglang.py"], folder)
    run(
        ["pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull, str(folder.parent / "test")],
        folder,
    )
    without = [seam for seam in TABLES if NEWEST in seam.versions and not seam.is_patched]
    assert int(run(["-W", "ignore", "-c", COUNT], folder).split()[-1]) == len(without) - 11


def run(arguments: list[str], folder: Path) -> str:
    """Run Python, or a module of it, with the SGLang in a folder. Return what it prints."""
    module = [] if arguments[0].startswith("-") else ["-m"]
    command = [sys.executable, *module, *arguments]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_rows_name_supported_releases() -> None:
    rows: tuple[Seam | Place, ...] = (*TABLES, *PLACES)
    assert [row.path for row in rows if not row.versions] == []  # they can go
    assert [row.path for row in rows if not set(row.versions) <= set(SGLANG_VERSIONS)] == []


def test_an_unknown_release_is_held_against_the_newest_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.5.99")
    assert table_version() == SGLANG_VERSIONS[-1]
    monkeypatch.setattr(importlib.metadata, "version", lambda name: SGLANG_VERSIONS[0])
    assert table_version() == SGLANG_VERSIONS[0]


def test_a_backend_learns_once_that_all_pools_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for known, num_calls in ((SimpleNamespace(on_host_pools_registered=None), 0), (SimpleNamespace(), 1)):
        monkeypatch.setattr(hicache_storage, "HiCacheStorage", known)
        announce_pools(backend := Mock())
        assert backend.on_host_pools_registered.call_count == num_calls


def test_what_the_older_release_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(attn_dcp_size=4)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    assert (dcp_size(SimpleNamespace(dcp_size=2)), dcp_size(SimpleNamespace())) == (2, 4)
    older = SimpleNamespace(hash_value=["a"] * 3, stats_requested_tokens=640)
    newer = SimpleNamespace(**vars(older), deadline_expired=False)
    assert [budget_pages(operation, 16) for operation in (older, newer)] == [3, 40]
    assert is_deadline_expired(older, elapsed_s=2.0, budget_s=1.0)
    assert not is_deadline_expired(older, elapsed_s=0.5, budget_s=1.0)
    assert not is_deadline_expired(newer, elapsed_s=2.0, budget_s=1.0)


def test_images_of_few_bits_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.runtime_context.get_server_args", lambda: None)
    model = SimpleNamespace(is_multimodal=True)
    config = Mock(from_server_args=Mock(return_value=model))
    monkeypatch.setattr("sglang.srt.configs.model_config.ModelConfig", config)
    item = "sglang.srt.managers.schedule_batch.MultimodalDataItem"
    monkeypatch.setattr(item, SimpleNamespace(padding_sequence=None))
    require_distinct_images()
    monkeypatch.setattr(item, SimpleNamespace())
    with pytest.raises(UnsupportedError, match="30 bits"):
        require_distinct_images()
    model.is_multimodal = False
    require_distinct_images()


def test_copies_to_the_host_pool_wait_for_the_forward_pass() -> None:
    controller = Mock()
    fence_writes(controller)
    copies = controller.l2_transfer_engine.device_to_host_stream
    assert copies.wait_stream.call_args_list == [call(controller.load_fence_stream)]
    controller.load_fence_stream = None
    fence_writes(controller)
    assert copies.wait_stream.call_count == 1


@pytest.mark.parametrize(("is_whole", "loading", "waits"), [(True, 0, [call(3)]), (True, -1, []), (False, 0, [])])
def test_a_graph_of_a_whole_pass_waits_for_its_last_layer(is_whole: bool, loading: int, waits: list[Any]) -> None:
    counter = Mock(num_layers=4, consumer_index=loading)
    pool = SimpleNamespace(layer_transfer_counter=counter)
    runner = SimpleNamespace(_is_full_backend=is_whole, model_runner=SimpleNamespace(token_to_kv_pool=pool))
    wait_for_layers(runner, forward_batch=None)
    assert counter.wait_until.call_args_list == waits
