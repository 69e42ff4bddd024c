"""``"quantiser": "auto"``: an engine without a profile serves by ``exact``, and by ``klt`` once there is one.

Rank 0 shows its data plane a sample of its prompts. The data plane calibrates on them, or finds that a neighbour has
done so, and says which profile there is. Then every rank takes a copy of that profile, and prepares a second data plane
that serves by it. When all ranks have one, all switch to it in the same step. Ranks learn of each other by one
collective every few steps. All of them take part in it, whatever they know.

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
    from sgl_kvfetch.plane import DataPlane, Start

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
_PARTS = 4  # of a digest of 128 bits, as integers of 32 bits

Follow: TypeAlias = "Callable[[str], Start]"
"""Returns what a data plane is started with that serves by a profile, from its path. May take its time."""


class AutoProfile:
    """Finds one rank's profile. ``follow`` is None where SGLang cannot go over to it while it serves. ``pauses``:
    whether the engine computes on the CPU, which calibrating must leave to it."""

    def __init__(self, plane: DataPlane, rank: int, num_ranks: int, follow: Follow | None, *, pauses: bool) -> None:
        self._plane = plane
        self._rank = rank
        self._num_ranks = num_ranks
        self._follow = follow
        self._pauses = pauses
        self._sample = PromptSample() if rank == 0 else None
        self._is_busy = False  # as the data plane knows
        self._num_steps = 0  # since the ranks have last agreed
        self._wanted = ""  # the digest that rank 0 has, once it is known here
        self._about = ""  # that profile, for people
        self._is_preparing = False
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
        """Go on: call every step of SGLang's ``Scheduler``."""
        if self._pauses and self._rank == 0:
            is_busy = not scheduler.is_fully_idle(for_health_check=True)
            if is_busy != self._is_busy:
                self._is_busy = is_busy
                self._plane.pause_calibration(is_paused=is_busy)
        if self._num_ranks > 1:
            self._num_steps += _IDLE_STEP if scheduler.last_batch is None else 1  # ranks have the same batches
            if self._num_steps < _AGREE_EVERY:
                return
            self._num_steps = 0
        state = self._state()
        if self._num_ranks > 1:
            least = torch.tensor(state)
            scheduler.tree_cache._all_reduce_attn_groups(least, torch.distributed.ReduceOp.MIN)
            state = least.tolist()
        self._go_on(state)

    def _state(self) -> list[int]:
        """Return what the minimum over ranks is taken of: whether this rank could switch, whether it has the profile
        that all want, and rank 0's profile."""
        taken = self._plane.taken_profile
        has_wanted = taken is not None and taken.digest == self._wanted
        digest = taken.digest if taken is not None and self._rank == 0 else "0" * 8 * _PARTS
        parts = (-int(digest[8 * i : 8 * i + 8], 16) for i in range(_PARTS))
        return [int(self._plane.is_prepared), int(has_wanted), *parts]

    def _go_on(self, least: Sequence[int]) -> None:
        """Go one step towards ``klt``. ``least``: `_state` over all ranks. It alone decides when this is over: a rank
        that left the others before would miss in their next collective."""
        can_switch, all_have_it, *parts = least
        if not any(parts):
            return
        if not self._wanted:
            self._wanted = "".join(f"{-part:08x}" for part in parts)
            if self._rank != 0:
                self._plane.take_profile(self._wanted)
        taken = self._plane.taken_profile
        if taken is not None and taken.digest == self._wanted:
            self._about = taken.about
            if self._follow is not None and not self._is_preparing:
                self._is_preparing = True
                self._plane.prepare(partial(self._follow, taken.path))
        if self._follow is None and all_have_it:
            end()
            logger.info(
                "kvfetch: %s; device mode on a GPU stores with it once the backend is attached again", self._about
            )
        elif can_switch:
            end()
            self._plane.switch()
            if self._rank == 0:
                logger.info("kvfetch: %s; this server stores with 'klt' from now on", self._about)


class _State:
    """The state of this process."""

    profile: AutoProfile | None = None


_state = _State()


def begin(profile: AutoProfile) -> None:
    _state.profile = profile


def end() -> None:
    _state.profile = None


def current() -> AutoProfile | None:
    """Return what finds a profile for the backend that is attached now; None if nothing does."""
    if _state.profile is not None and _state.profile.is_over:
        end()
    return _state.profile
