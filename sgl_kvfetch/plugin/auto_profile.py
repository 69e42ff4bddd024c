"""``"quantiser": "auto"``: an engine without a profile serves by ``exact``, and by ``klt`` once there is one.

Rank 0 shows its data plane a sample of its prompts. The data plane calibrates on them, or finds that a neighbour has
done so, and says which profile there is. The other ranks hear of it by one collective every few steps, in which all of
them take part. In the step in which they do, each rank's data plane ends, and the next one serves by that profile. No
rank reads or writes by ``exact`` any more when another one has begun with ``klt``: what was computed behind a hit of
``klt`` must not be stored as exact.

SGLang has one backend in a process at a time, so this is the state of the process. All of it runs on the scheduler's
thread, and does no I/O but messages to the data plane.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from sgl_kvfetch.keys import label_of_request
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS, NUM_WINDOWS

if TYPE_CHECKING:  # hooks import this module in every SGLang, also without our backend
    from sgl_kvfetch.engine import DataPlane, Peer
    from sgl_kvfetch.protocol import Start

logger = logging.getLogger(__name__)


_WINDOW = CONTEXT_TOKENS + CONTINUATION_TOKENS
_LEAST = 64  # tokens of a prompt that is looked at: joined, shorter ones make no text
_SPARE = _WINDOW // _LEAST  # tokens: each piece of a window may lose one that stands before every prompt


class PromptSample:
    """As many windows of prompts as ``kvfetch calibrate`` takes by default.

    A window is a piece of one prompt, or pieces of several short ones. It takes what the engine has computed of a
    prompt, not what it had from an earlier prompt or from the store. So prompts that begin alike, as with one system
    prompt, do not make windows that are alike. Prompts with a ``cache_salt`` or an ``extra_key``, which keep tenants
    apart, and those with adapters or images are left out.

    The work for a batch is one look at each of its requests, and at most one copy of a window's tokens for each prompt,
    until the sample is full.
    """

    def __init__(self, num_windows: int = NUM_WINDOWS) -> None:
        self._num_windows = num_windows
        self._windows: list[tuple[bytes, ...]] = []
        self._short: list[bytes] = []  # pieces of the window that is being joined
        self._num_short = 0  # their tokens
        self._seen: set[bytes | str] = set()  # pieces, and requests

    def add_batch(self, batch: Any) -> None:
        """Look at a batch that was computed, SGLang's ``ScheduleBatch``."""
        if self.is_full or not batch.forward_mode.is_extend_without_speculative():
            return
        if len(batch.reqs) != len(batch.extend_lens):  # requests have left it
            return
        decoding = batch.decoding_reqs or ()  # along with the prompts, in mixed chunked prefill
        for request, first, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            if request not in decoding and not (request.cache_salt or request.extra_key or request.multimodal_inputs):
                self.add(label_of_request(request.rid), request.origin_input_ids, first, length)

    def add(self, request_id: str, prompt: Sequence[int], first: int, length: int) -> None:
        """Look at ``length`` tokens of a prompt that were computed, from ``first`` on."""
        num_tokens = min(length, _WINDOW, len(prompt) - first)
        if self.is_full or num_tokens < _LEAST or request_id in self._seen:
            return
        piece = array("i", prompt[first : first + num_tokens]).tobytes()
        if piece in self._seen:
            return
        self._seen |= {request_id, piece}
        if num_tokens == _WINDOW:
            self._windows.append((piece,))
            return
        self._short.append(piece)
        self._num_short += num_tokens
        if self._num_short >= _WINDOW + _SPARE:
            self._windows.append(tuple(self._short))
            self._short, self._num_short = [], 0

    @property
    def num_windows(self) -> int:
        return len(self._windows)

    @property
    def is_full(self) -> bool:
        return self.num_windows >= self._num_windows

    def take_windows(self) -> Sequence[tuple[bytes, ...]]:
        """Return the sample, int32 token ids, and forget it."""
        windows, self._windows = self._windows, []
        self._seen.clear()
        return windows


_AGREE_EVERY = 64  # steps: the collective of several ranks takes about as long as one step of decoding in 20
_IDLE_STEP = 16  # steps that one without a batch stands for: with --sleep-on-idle, it lasts a second
_SAY_EVERY = 5  # windows of the sample
_DIGEST_BYTES = 16

Follow: TypeAlias = "Callable[[str, Peer], Start]"
"""Returns what a data plane is started with that serves by a profile, from its digest. May take its time."""


class AutoProfile:
    """Goes over to a profile. ``follow`` is None where SGLang cannot go over to it while it serves. ``pauses``: whether
    the engine computes on the CPU, which calibrating must leave to it."""

    def __init__(self, plane: DataPlane, rank: int, num_ranks: int, follow: Follow | None, *, pauses: bool) -> None:
        self._plane = plane
        self._rank = rank
        self._num_ranks = num_ranks
        self._follow = follow
        self._pauses = pauses
        self._sample = PromptSample() if rank == 0 else None
        self._is_busy = False  # as the data plane knows
        self._num_steps = 0  # since the ranks have last agreed
        if rank == 0:
            logger.info(
                "kvfetch: the store has no profile of these weights yet: this server stores with 'exact', and takes a "
                "sample of its prompts to make one"
            )

    @property
    def is_over(self) -> bool:
        return self._plane.is_closing

    def batch_ended(self, batch: Any) -> None:
        """Look at a batch that was computed, SGLang's ``ScheduleBatch``."""
        if self._sample is None:
            return
        num_before = self._sample.num_windows
        self._sample.add_batch(batch)
        if self._sample.num_windows // _SAY_EVERY > num_before // _SAY_EVERY:
            logger.info(
                "kvfetch: the sample of prompts has %d of %d windows of %d tokens",
                self._sample.num_windows,
                NUM_WINDOWS,
                _WINDOW,
            )
        if self._sample.is_full:
            logger.info("kvfetch: the sample of prompts is complete")
            self._plane.show_prompts(self._sample.take_windows())
            self._sample = None

    def step(self, scheduler: Any) -> None:
        """Go over to a profile, if there is one: call every step of SGLang's ``Scheduler``, on all ranks."""
        if self._pauses and self._rank == 0:
            is_busy = not scheduler.is_fully_idle(for_health_check=True)
            if is_busy != self._is_busy:
                self._is_busy = is_busy
                self._plane.pause_calibration(is_paused=is_busy)
        digest = self._plane.found_profile
        if self._num_ranks > 1:
            self._num_steps += _IDLE_STEP if scheduler.last_batch is None else 1  # ranks have the same batches
            if self._num_steps < _AGREE_EVERY:
                return
            self._num_steps = 0
            digest = _of_rank_0(digest, scheduler.tree_cache)
        if not digest:
            return
        end()
        if self._follow is not None:
            self._plane.switch(partial(self._follow, digest))
        elif self._rank == 0:
            logger.info(
                "kvfetch: the store has profile %s; device mode on a GPU stores with it once the backend is attached "
                "again",
                digest,
            )


def _of_rank_0(digest: str, tree: Any) -> str:
    """Return the digest that rank 0 calls this with; other ranks have none. ``tree``: SGLang's radix cache."""
    parts = torch.tensor(list(bytes.fromhex(digest) or bytes(_DIGEST_BYTES)))
    tree._all_reduce_attn_groups(parts, torch.distributed.ReduceOp.MAX)
    return bytes(parts.tolist()).hex() if parts.any() else ""


class _State:
    """The state of this process."""

    profile: AutoProfile | None = None


_state = _State()


def begin(profile: AutoProfile) -> None:
    _state.profile = profile


def end() -> None:
    _state.profile = None


def current() -> AutoProfile | None:
    """Return what goes over to a profile for the backend that is attached now; None if nothing does."""
    if _state.profile is not None and _state.profile.is_over:
        end()
    return _state.profile
