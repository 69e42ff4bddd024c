"""A sample of an engine's prompts, as calibration needs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from sgl_kvfetch.labels import label_of_request
from sgl_kvfetch.prompts import CONTEXT_TOKENS, CONTINUATION_TOKENS, NUM_WINDOWS

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
    def is_full(self) -> bool:
        return len(self._windows) >= self._num_windows

    def take_windows(self) -> Sequence[tuple[bytes, ...]]:
        """Return the sample, int32 token ids, and forget it."""
        windows, self._windows = self._windows, []
        self._seen.clear()
        return windows
