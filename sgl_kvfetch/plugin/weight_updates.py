"""The backends of this process, and what became of the weights that they store the KV cache of.

A namespace is made of the weights that the engine started with. SGLang can change them while it runs, from files,
tensors or another process, wholly or in part, and an update that fails may have changed some of them. So the first sign
of one switches every backend off, and afterwards the model's files no longer say what the weights are: the user must.

All of it runs on the scheduler's thread, as attaching, detaching and updating weights do.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from sgl_kvfetch.errors import UnsupportedError

_WHAT_TO_DO = (
    "flush the cache (POST /flush_cache), detach the storage backend and attach it again with a model_id that names "
    "the new weights (DELETE and PUT /hicache/storage-backend), or restart"
)


class Suspendable(Protocol):
    def suspend(self, reason: str) -> None:
        """Neither read nor write from now on."""


class _State:
    """Of this process. A class, so that tests can have their own."""

    def __init__(self) -> None:
        self.accesses: weakref.WeakSet[Suspendable] = weakref.WeakSet()  # of backends
        self.model_ids: set[str] = set()  # in use for the weights of this moment
        self.former_model_ids: set[str] = set()  # in use for weights that are gone
        self.change: str | None = None  # the latest one of the weights
        self.num_changes = 0
        self.num_changes_when_empty = 0  # when SGLang's tree was emptied last


_state = _State()


def register(access: Suspendable, model_id: str | None) -> None:
    """Have a backend's ``access`` suspended when the weights change. ``model_id`` is what the user calls those of this
    moment."""
    _state.accesses.add(access)
    if model_id is not None:
        _state.model_ids.add(model_id)


def forget(access: Suspendable) -> None:
    """The backend is closed."""
    _state.accesses.discard(access)


def tree_is_empty() -> None:
    """SGLang's tree holds no pages now. A process has one."""
    _state.num_changes_when_empty = _state.num_changes


def weights_change(change: str) -> None:
    """Suspend every backend, because the weights are about to change. ``change`` says how, for the log."""
    _state.change = change
    _state.num_changes += 1
    _state.former_model_ids |= _state.model_ids
    _state.model_ids.clear()
    # Each once: what a backend is told again, it need not count and log again.
    accesses, _state.accesses = list(_state.accesses), weakref.WeakSet()
    for access in accesses:
        access.suspend(f"the model's weights change ({change}), and the stored pages are the old ones'; {_WHAT_TO_DO}")
    if accesses:
        from sgl_kvfetch import metrics  # not before SGLang has set up what it needs

        metrics.SUSPENSIONS.inc(len(accesses))


def require_known_weights(model_id: str | None) -> None:
    """Raises UnsupportedError if ``model_id`` cannot tell these weights from those that the engine had before."""
    if _state.change is None:
        return
    if model_id is None:
        raise UnsupportedError(
            f"the weights were changed while the server ran ({_state.change}), so the model's files do not tell what "
            "they are now: set model_id in the kvfetch config to a name of your own for them, or restart"
        )
    if model_id in _state.former_model_ids:
        raise UnsupportedError(
            f"model_id = {model_id!r} names the weights that the server had before they were changed "
            f"({_state.change}): set it to another name for the present ones, or restart"
        )


def require_no_former_pages() -> None:
    """Raises UnsupportedError if SGLang's tree may hold pages of weights that were changed since: they would be stored
    under the present ones' name."""
    if _state.num_changes != _state.num_changes_when_empty:
        raise UnsupportedError(
            "the tree may hold pages of weights that were changed since: flush it, POST /flush_cache"
        )
