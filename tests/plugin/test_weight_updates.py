from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from harness.metrics import own_metric
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import hooks, weight_updates
from sgl_kvfetch.plugin.weight_updates import Access
from sgl_kvfetch.protocol.config import parse_config
from tests.plugin.backends import Make

pytestmark = pytest.mark.filterwarnings("ignore")


class UpdateWeightsFromSomewhere:
    tags: list[str] | None = None
    action = "checksum"


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())


def new_access(model_id: str | None = None) -> Access:
    access = Access(parse_config({"store": "http://nowhere"}))
    weight_updates.register_access(access, model_id)
    return access


@pytest.fixture
def access(state: None) -> Access:
    """A backend's."""
    return new_access()


def test_every_backend_is_suspended_once_and_told_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    accesses = [new_access(), new_access()]
    before = own_metric("sgl_kvfetch_suspensions_total")
    for _ in range(3):
        hooks.suspend_for_update(None, UpdateWeightsFromSomewhere())
    assert own_metric("sgl_kvfetch_suspensions_total") == before + 2
    assert not any(access.reads or access.writes for access in accesses)
    assert caplog.text.count("(UpdateWeightsFromSomewhere), and stored pages are of the old ones; flush the cache") == 2


def test_changed_weights_need_a_name_that_is_new(make: Make) -> None:
    weight_updates.require_known_weights(None)
    backend = make(model_id="one")
    weight_updates.require_known_weights("one")
    assert backend.access.reads
    weight_updates.weights_change("UpdateWeights")
    assert not backend.access.reads
    with pytest.raises(UnsupportedError, match="POST /flush_cache"):  # the tree has pages of the former weights
        make(model_id="two")
    hooks.record_empty_tree(None, None)
    with pytest.raises(UnsupportedError, match=r"changed while the server ran \(UpdateWeights\).*set model_id"):
        weight_updates.require_known_weights(None)
    with pytest.raises(UnsupportedError, match="'one' names the weights that the server had before"):
        weight_updates.require_known_weights("one")
    backend = make(model_id="two")
    weight_updates.require_known_weights("two")
    weight_updates.weights_change("again")
    assert not backend.access.reads
    for name in ("one", "two"):
        with pytest.raises(UnsupportedError, match=name):
            weight_updates.require_known_weights(name)


@pytest.mark.parametrize(("session", "suspends"), [(None, False), (object(), True)])
def test_an_update_that_no_session_is_open_for_changes_nothing(access: Access, session: object, suspends: bool) -> None:
    hooks.suspend_in_session(SimpleNamespace(_session=session), UpdateWeightsFromSomewhere())
    assert access.reads is not suspends
    assert (weight_updates._state.change is not None) is suspends


def test_an_update_that_finds_no_files_on_any_rank_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    not_found = "Failed to get weights iterator: Cannot find any model weights with `x`."
    for success, message, num_runners, num_stages, change_elsewhere, suspends in (
        (False, not_found, 1, 1, 0, False),
        (False, not_found, 1, 1, 1, True),  # another rank has found files
        (False, not_found, 2, 1, 0, True),  # of the draft model, perhaps, when the model was updated
        (False, not_found, 1, 2, 0, True),
        (False, "Failed to update weights: x.\nRolling back to original weights.", 1, 1, 0, True),
        (True, "Succeeded to update model weights.", 1, 1, 0, True),
    ):
        agreed: list[int] = []

        def all_reduce(
            changed: torch.Tensor, op: Any, group: object, agreed: list[int] = agreed, least: int = change_elsewhere
        ) -> None:
            assert (op, group) == (torch.distributed.ReduceOp.MAX, "tp")
            agreed.append(int(changed.item()))
            changed.clamp_(min=least)

        monkeypatch.setattr(weight_updates, "_state", weight_updates._State())
        monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
        parallel = SimpleNamespace(pp_size=num_stages)
        monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda parallel=parallel: parallel)
        access, output = new_access("mine"), SimpleNamespace(success=success, message=message)
        manager = SimpleNamespace(tp_cpu_group="tp", _select_runners=Mock(return_value=[None] * num_runners))
        assert hooks.watch_disk_update(Mock(return_value=output), manager, UpdateWeightsFromSomewhere()) is output
        assert agreed == [int(suspends and not change_elsewhere)]  # of every rank, whatever it has found
        assert access.reads is not suspends
        if not suspends:
            weight_updates.require_known_weights("mine")
            weight_updates.require_no_former_pages()


@pytest.mark.parametrize("is_asked", [True, False])
def test_no_thread_of_ours_uses_the_gpu_while_graphs_are_captured_anew(
    is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step goes on. Updates that name the same flag come by other methods, too."""
    done: list[str] = []
    linker = SimpleNamespace(is_kvfetch=True, leave_gpu=lambda: done.append("left"))
    tree = SimpleNamespace(linker=SimpleNamespace(cache_linker=linker))
    manager = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=tree))
    request = SimpleNamespace(recapture_cuda_graph=is_asked)
    monkeypatch.setattr(hooks, "_may_have_changed", lambda *args: True)
    hooks.watch_disk_update(lambda *args: done.append("captured"), manager, request)
    hooks.suspend_for_update(manager, request)
    assert done == (["left", "captured", "left"] if is_asked else ["captured"])


def test_an_update_that_raises_may_have_changed_weights(access: Access) -> None:
    with pytest.raises(RuntimeError):
        hooks.watch_disk_update(Mock(side_effect=RuntimeError), None, UpdateWeightsFromSomewhere())
    assert not access.reads


def test_a_tree_that_an_update_empties_holds_no_former_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_may_have_changed", lambda *args: True)
    hooks.watch_disk_update(lambda *args: hooks.record_empty_tree(None, None), None, UpdateWeightsFromSomewhere())
    weight_updates.require_no_former_pages()


@pytest.mark.parametrize(("action", "suspends"), [("checksum", False), ("reset_tensors", True)])
def test_checking_weights_may_overwrite_them(access: Access, action: str, suspends: bool) -> None:
    hooks.suspend_for_reset(None, SimpleNamespace(action=action))
    assert access.reads is not suspends


@pytest.mark.parametrize(
    ("tags", "saver", "copy", "suspends"),
    [
        (None, True, False, True),
        (["weights", "kv_cache"], True, False, True),
        (["kv_cache"], True, False, False),
        (None, True, True, False),
        (None, False, False, False),
    ],
)
def test_releasing_weights_suspends_unless_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, access: Access, tags: Any, saver: bool, copy: bool, suspends: bool
) -> None:
    features = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=copy)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(features=features))
    manager = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=SimpleNamespace()))  # it has no linker
    hooks.suspend_for_release(manager, SimpleNamespace(tags=tags))
    assert access.reads is not suspends
