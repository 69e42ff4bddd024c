"""Attaching and detaching a store while the engine serves. tests/e2e/test_device_ends.py tests a whole engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.device.linker import KVFetchLinker
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.rig import Ranks, Rig, prompt
from tests.plugin.queues import fill_queue

pytestmark = pytest.mark.filterwarnings("ignore")

NO_POLICIES = (None, None)


@pytest.fixture(autouse=True)
def _weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())


@pytest.mark.parametrize("component", [ComponentType.SWA, ComponentType.MAMBA, ComponentType.C128])
def test_what_the_tree_keeps_elsewhere_is_refused_by_name(component: ComponentType) -> None:
    """Its pages would not be stored, or not be handed over."""
    pool = MHATokenToKVPool(8, 4, torch.float32, 1, 4, 1, "cpu", False)
    no_drafts = dict.fromkeys(("mtp_draft_device_pools", "mtp_draft_mamba_pools", "sidecar_draft_device_pools"), ())
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=4, **no_drafts)
    with pytest.raises(
        UnsupportedError, match=f"a KV cache of .*{component}.* in the pools MHATokenToKVPool: add --en"
    ):
        KVFetchLinker(None, params, components={ComponentType.FULL, component})


@pytest.mark.parametrize(
    ("backend", "policies", "message"),
    [
        ("file", NO_POLICIES, "accepts only the storage backend kvfetch"),
        ("kvfetch", (None, "write_back"), "no policies"),
        ("kvfetch", ("timeout", None), "no policies"),
    ],
)
def test_unsupported_arguments_are_refused(
    make: MakeRig, backend: str, policies: tuple[str | None, str | None], message: str
) -> None:
    rig = make()
    text = rig.parts.extra_config
    rig.linker.detach()
    is_attached, said = rig.linker.attach(backend, text, policies)
    assert not is_attached
    assert message in said


def test_attaching_twice(make: MakeRig) -> None:
    rig = make()
    for text in (rig.parts.extra_config, None):
        assert rig.linker.attach("kvfetch", text, NO_POLICIES) == (
            True,
            "kvfetch is already attached with this config.",
        )
    is_attached, said = rig.linker.attach("kvfetch", '{"store": "http://elsewhere"}', NO_POLICIES)
    assert not is_attached
    assert "detach it first" in said


@pytest.mark.parametrize("fault", [ConfigError("no such key"), OSError("no such file")])
def test_all_ranks_attach_or_none(make: MakeRig, fault: Exception) -> None:
    ranks = Ranks(2)
    rigs = [make(rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    text = rigs[0].parts.extra_config

    def refuse(extra_config: str | None) -> None:
        raise fault

    def change(rank: int, history: list[Any]) -> None:
        linker = rigs[rank].linker
        linker.detach()
        if rank == 1:
            linker.__dict__["connect"] = refuse
        history.append(linker.attach("kvfetch", text, NO_POLICIES))
        linker.__dict__.pop("connect", None)
        history.append(linker.attach("kvfetch", text, NO_POLICIES))

    (first, then), (second, _) = ranks.run(change)
    assert first == (False, "another rank could not attach the storage backend; see its log for the reason")
    assert second[0] is False
    assert str(fault) in second[1]
    assert then == (True, "kvfetch is attached.")


def test_detaching_gives_back_the_locks_of_copies(rig: Rig) -> None:
    text = rig.parts.extra_config
    fill_queue(rig.parts.plane)  # copies wait for room
    rig.compute(prompt(0))
    rig.step()
    assert rig.cache.protected_size() == 32
    rig.linker.detach()
    rig.step()
    rig.cache.check_hicache_events()
    assert rig.cache.protected_size() == 0
    assert rig.holds(prompt(0), 32)
    assert rig.linker.attach("kvfetch", text, NO_POLICIES)[0]
    rig.compute(prompt(0))  # its pages do not count as written
    rig.write_all()
    rig.flush()
    assert rig.fetch(prompt(0)) == 32
    rig.assert_nothing_held()
