# mypy: disable-error-code="arg-type, comparison-overlap"
# Access stands in for the backend's.
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.metrics import own_metric
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import hooks, weight_updates
from tests.plugin.backends import Make

pytestmark = pytest.mark.filterwarnings("ignore")


class Access:
    def __init__(self) -> None:
        self.reasons: list[str] = []

    def suspend(self, reason: str) -> None:
        self.reasons.append(reason)


class UpdateWeightsFromSomewhere:
    tags: list[str] | None = None
    action = "checksum"


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())


def test_every_backend_is_suspended_once_and_told_what_to_do() -> None:
    backends = [Access(), Access()]
    for backend in backends:
        weight_updates.register_access(backend, None)
    before = own_metric("sgl_kvfetch_suspensions_total")
    for _ in range(3):
        hooks.suspend_for_update(None, UpdateWeightsFromSomewhere())
    assert own_metric("sgl_kvfetch_suspensions_total") == before + 2
    for backend in backends:
        assert len(backend.reasons) == 1
        for words in ("UpdateWeightsFromSomewhere", "detach", "attach", "model_id", "restart"):
            assert words in backend.reasons[0]


def test_changed_weights_need_a_name_that_is_new() -> None:
    weight_updates.require_known_weights(None)
    weight_updates.register_access(Access(), "one")
    weight_updates.require_known_weights("one")
    weight_updates.weights_change("UpdateWeights")
    with pytest.raises(UnsupportedError, match=r"changed while the server ran \(UpdateWeights\).*set model_id"):
        weight_updates.require_known_weights(None)
    with pytest.raises(UnsupportedError, match="'one' names the weights that the server had before"):
        weight_updates.require_known_weights("one")
    weight_updates.require_known_weights("two")
    weight_updates.register_access(backend := Access(), "two")
    weight_updates.require_known_weights("two")
    weight_updates.weights_change("again")
    assert len(backend.reasons) == 1
    for name in ("one", "two"):
        with pytest.raises(UnsupportedError, match=name):
            weight_updates.require_known_weights(name)


def test_a_tree_with_pages_of_former_weights_is_not_attached_to() -> None:
    weight_updates.require_no_former_pages()
    weight_updates.weights_change("UpdateWeights")
    with pytest.raises(UnsupportedError, match="flush it"):
        weight_updates.require_no_former_pages()
    hooks.record_empty_tree(None, None)
    weight_updates.require_no_former_pages()


@pytest.mark.parametrize(("session", "suspends"), [(None, False), (object(), True)])
def test_an_update_that_no_session_is_open_for_changes_nothing(session: object, suspends: bool) -> None:
    weight_updates.register_access(backend := Access(), None)
    hooks.suspend_in_session(SimpleNamespace(_session=session), UpdateWeightsFromSomewhere())
    assert bool(backend.reasons) is suspends
    assert (weight_updates._state.change is not None) is suspends


_NOT_FOUND = "Failed to get weights iterator: Cannot find any model weights with `x`."


@pytest.mark.parametrize(
    ("success", "message", "num_runners", "num_stages", "change_elsewhere", "suspends"),
    [
        (False, _NOT_FOUND, 1, 1, 0, False),
        (False, _NOT_FOUND, 1, 1, 1, True),  # another rank has found files
        (False, _NOT_FOUND, 2, 1, 0, True),  # of the draft model, perhaps, when the model was updated
        (False, _NOT_FOUND, 1, 2, 0, True),
        (False, "Failed to update weights: x.\nRolling back to original weights.", 1, 1, 0, True),
        (False, "Weights were updated, but the cache was not flushed", 1, 1, 0, True),
        (True, "Succeeded to update model weights.", 1, 1, 0, True),
    ],
)
def test_an_update_that_finds_no_files_on_any_rank_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
    success: bool,
    message: str,
    num_runners: int,
    num_stages: int,
    change_elsewhere: int,
    suspends: bool,
) -> None:
    agreed: list[int] = []

    def all_reduce(changed: torch.Tensor, op: Any, group: object) -> None:
        assert (op, group) == (torch.distributed.ReduceOp.MAX, "tp")
        agreed.append(int(changed.item()))
        changed.clamp_(min=change_elsewhere)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(pp_size=num_stages))
    weight_updates.register_access(backend := Access(), "mine")
    output = SimpleNamespace(success=success, message=message)
    manager = SimpleNamespace(_select_runners=lambda: [None] * num_runners, tp_cpu_group="tp")
    assert hooks.watch_disk_update(lambda *args: output, manager, UpdateWeightsFromSomewhere()) is output
    assert agreed == [int(suspends and not change_elsewhere)]  # of every rank, whatever it has found
    assert bool(backend.reasons) is suspends
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
    assert done == ["left"] * is_asked + ["captured"]
    hooks.suspend_for_update(manager, request)
    assert done[-1] == ("left" if is_asked else "captured")


def test_an_update_that_raises_may_have_changed_weights() -> None:
    def fail(*args: object) -> None:
        raise RuntimeError

    weight_updates.register_access(backend := Access(), None)
    with pytest.raises(RuntimeError):
        hooks.watch_disk_update(fail, None, UpdateWeightsFromSomewhere())
    assert backend.reasons


def test_a_tree_that_an_update_empties_holds_no_former_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "_may_have_changed", lambda *args: True)
    hooks.watch_disk_update(lambda *args: hooks.record_empty_tree(None, None), None, UpdateWeightsFromSomewhere())
    weight_updates.require_no_former_pages()


@pytest.mark.parametrize(("action", "suspends"), [("checksum", False), ("compare", False), ("reset_tensors", True)])
def test_checking_weights_may_overwrite_them(action: str, suspends: bool) -> None:
    weight_updates.register_access(backend := Access(), None)
    hooks.suspend_for_reset(None, SimpleNamespace(action=action))
    assert bool(backend.reasons) is suspends


@pytest.mark.parametrize(
    ("tags", "saver", "copy", "suspends"),
    [
        (None, True, False, True),
        ([], True, False, True),
        (["weights", "kv_cache"], True, False, True),
        (["kv_cache"], True, False, False),
        (None, True, True, False),
        (None, False, False, False),
    ],
)
def test_releasing_weights_suspends_unless_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tags: Any, saver: bool, copy: bool, suspends: bool
) -> None:
    features = SimpleNamespace(enable_memory_saver=saver, enable_weights_cpu_backup=copy)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(features=features))
    weight_updates.register_access(backend := Access(), None)
    manager = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=SimpleNamespace()))  # it has no linker
    hooks.suspend_for_release(manager, SimpleNamespace(tags=tags))
    assert bool(backend.reasons) is suspends


def test_a_backend_registers_itself_unless_pages_of_former_weights_are_left(make: Make) -> None:
    backend = make(model_id="mine")
    assert backend.access.reads
    weight_updates.weights_change("x")
    assert not backend.access.reads
    with pytest.raises(UnsupportedError, match="'mine'"):
        weight_updates.require_known_weights("mine")
    with pytest.raises(UnsupportedError, match="POST /flush_cache"):
        make(model_id="other")
    weight_updates.tree_is_empty()
    make(model_id="other")
