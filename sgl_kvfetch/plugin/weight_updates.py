"""Switches this process's backends off when the model's weights change.

A namespace identifies the weights that the engine started with. SGLang can change them while it runs, from files,
tensors or another process, wholly or in part, and a failed update may have changed some of them. So the first sign of a
change switches every backend off. Afterwards the model's files no longer identify the weights; the user must name them.
Nothing is switched off only where SGLang refused an update before it touched a weight, on every rank: files that are
not there, or tensors outside a session of updates.

All of this runs on the scheduler's thread, as attaching, detaching and updating weights do.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING

from sgl_kvfetch.errors import UnsupportedError

if TYPE_CHECKING:  # hooks import this module in every SGLang, also without our backend
    from sgl_kvfetch.protocol import KVFetchConfig

logger = logging.getLogger(__name__)

_WHAT_TO_DO = (
    "flush the cache (POST /flush_cache), detach the storage backend and attach it again with a model_id that names "
    "the new weights (DELETE and PUT /hicache/storage-backend), or restart"
)


class Access:
    """A backend's permission to read from its store and to write to it: the config's, until the weights change."""

    def __init__(self, config: KVFetchConfig) -> None:
        self.reads, self.writes = config.reads, config.writes
        self._suspended = False

    def suspend(self, reason: str) -> None:
        """Stop reading and writing, because what the engine computes no longer belongs to the namespace. This lasts
        until the backend is detached and attached again. Any thread may call it; it never waits."""
        if not self._suspended:
            self._suspended, self.reads, self.writes = True, False, False
            logger.warning("kvfetch neither reads nor writes any more: %s", reason)


class _State:
    """The state of this process. It is a class so that tests can have their own."""

    def __init__(self) -> None:
        self.accesses: weakref.WeakSet[Access] = weakref.WeakSet()  # of all backends
        self.model_ids: set[str] = set()  # names of the present weights
        self.former_model_ids: set[str] = set()  # names of earlier weights
        self.change: str | None = None  # the latest change of the weights
        self.num_changes = 0
        self.num_changes_when_empty = 0  # `num_changes` when SGLang's tree was last emptied


_state = _State()


def register_access(access: Access, model_id: str | None) -> None:
    """Register a backend's ``access``, to be suspended when the weights change. ``model_id``: the user's name for the
    present weights."""
    _state.accesses.add(access)
    if model_id is not None:
        _state.model_ids.add(model_id)


def forget_access(access: Access) -> None:
    """Forget the access of a backend that is closed."""
    _state.accesses.discard(access)


def tree_is_empty() -> None:
    """Record that SGLang's tree, of which a process has one, holds no pages now."""
    _state.num_changes_when_empty = _state.num_changes


def weights_change(change: str) -> None:
    """Suspend every backend, because the weights are about to change. ``change`` says how, for the log."""
    begin_change()
    end_change(change, has_happened=True)


def begin_change() -> None:
    """Record that an update begins, at whose end SGLang may empty its tree. `end_change` must follow."""
    _state.num_changes += 1


def end_change(change: str, *, has_happened: bool) -> None:
    """Suspend every backend if the update has changed a weight, or may have."""
    if not has_happened:
        _state.num_changes -= 1
        return
    _state.change = change
    _state.former_model_ids |= _state.model_ids
    _state.model_ids.clear()
    # Suspend each backend only once, so that it is counted and logged once.
    accesses, _state.accesses = list(_state.accesses), weakref.WeakSet()
    for access in accesses:
        access.suspend(f"the model's weights change ({change}), and stored pages are of the old ones; {_WHAT_TO_DO}")
    if accesses:
        from sgl_kvfetch import metrics  # not before SGLang has set up what it needs

        metrics.SUSPENSIONS.inc(len(accesses))


def require_known_weights(model_id: str | None) -> None:
    """Raise UnsupportedError if ``model_id`` does not distinguish the present weights from earlier ones."""
    if _state.change is None:
        return
    if model_id is None:
        raise UnsupportedError(
            f"the weights were changed while the server ran ({_state.change}), so the model's files no longer identify "
            "them: set model_id in the kvfetch config to a name of your own for the present weights, or restart"
        )
    if model_id in _state.former_model_ids:
        raise UnsupportedError(
            f"model_id = {model_id!r} names the weights that the server had before they were changed "
            f"({_state.change}): set model_id to another name for the present weights, or restart"
        )


def require_no_former_pages() -> None:
    """Raise UnsupportedError if SGLang's tree may hold pages of earlier weights, which would then be stored under the
    name of the present weights."""
    if _state.num_changes != _state.num_changes_when_empty:
        raise UnsupportedError("the tree may hold pages of earlier weights: flush it first, POST /flush_cache")
