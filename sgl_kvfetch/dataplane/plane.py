"""The engine's side of the data plane: starts it, watches it and restarts it.

When a data plane dies, its work under way counts as misses. Only methods whose docstrings say so wait.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.dataplane import messages as m
from sgl_kvfetch.dataplane.arena import Arena, Room
from sgl_kvfetch.dataplane.channel import Channel
from sgl_kvfetch.dataplane.launch import Launch, Line, Running
from sgl_kvfetch.errors import ConfigError, KVFetchError, StoreError, UnsupportedError
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.quant import CellValues
from sgl_kvfetch.types import TENSORS, KVGeometry

logger = logging.getLogger(__name__)

R = TypeVar("R")

VALUES_BYTES = 64 << 20  # for values on their way to the engine
PAGES_BYTES = 64 << 20  # for pages on their way to the store
_START_S = 60.0  # importing torch takes this long on a busy machine
_TICK_S = 0.25
_SILENT_TICKS = 12  # after more consecutive ticks without an answer, the data plane counts as hung
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 30.0
_STEADY_S = 5.0  # after a data plane has served this long, the backoff starts anew
_CLOSE_S = 10.0
_REFUSALS: dict[str, type[KVFetchError]] = {kind.__name__: kind for kind in (ConfigError, UnsupportedError)}
_ANSWER_S = 5.0  # how much longer a caller waits than the data plane's own deadline


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated duration of a fetch, from measurements. None: not measured yet, or too long ago."""

    transmit_s: float | None
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """The duration of the slower stage, because the stages overlap."""
        return None if self.transmit_s is None else max(self.transmit_s, self.decode_s or 0.0)


@dataclass(frozen=True, slots=True)
class Find:
    """A lookup's result: how many pages are stored, from the first on. ``work``: the lookup's number."""

    work: int
    num_pages: int
    cost: Cost


@dataclass(slots=True, eq=False)
class FetchCall:
    """A fetch under way. Other threads complete the futures; every future is completed, whatever happens.

    ``here``: for each round, the cost of its pages and all later ones, when its first bytes are here; None if it ended
    before. ``over``: for each round, how many of its pages, from the first on, are restored; nothing is written after
    that. ``link``: done when the link could serve another fetch as well. ``end``: done when the fetch is over.
    """

    work: int
    here: list[Future[Cost | None]]
    over: list[Future[int]]
    link: Future[None] = field(default_factory=Future)
    end: Future[None] = field(default_factory=Future)
    destinations: dict[int, Destination] = field(default_factory=dict)


class DataPlane:
    """One rank's data plane. Call ``close`` at the end."""

    def __init__(self, start: m.Start, geometry: KVGeometry, launch: Launch) -> None:
        """Start the data plane and wait until it serves. Raises KVFetchError if it refuses the config or fails."""
        self._start = start
        self._geometry = geometry
        self._launch = launch
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        self._run = self._begin_run()  # has ended while the next one is being started
        self._thread = threading.Thread(target=self._watch, name="kvfetch-data", daemon=True)
        self._thread.start()

    # Reading

    def look_up(self, hashes: Sequence[bytes], on_found: Callable[[Find], None], *, reads_ahead: bool = False) -> int:
        """Find the longest stored run of these pages. ``on_found`` is called once, on another thread or on this one."""
        work = next(self._numbers)
        self._run.look_up(m.LookUp(work, b"".join(hashes), reads_ahead), on_found)
        return work

    def forget(self, lookup: int) -> None:
        """Note that the pages that a lookup found will not be fetched."""
        self._send(m.Forget(lookup))

    def fetch(
        self,
        hashes: Sequence[bytes],
        round_ends: Sequence[int],
        deadline_s: float,
        *,
        found: int | None = None,
        first_page: int = 0,
        request_id: str = "",
    ) -> FetchCall:
        """Begin to transmit pages. Arguments as in `messages.Fetch`."""
        work = next(self._numbers)
        call = FetchCall(work, [Future() for _ in round_ends], [Future() for _ in round_ends])
        command = m.Fetch(work, b"".join(hashes), tuple(round_ends), deadline_s, found, first_page, request_id)
        self._run.fetch(command, call)
        return call

    def give(self, call: FetchCall, index: int, destination: Destination) -> None:
        """Restore a round into ``destination``. Nothing is written to it after the round is over."""
        call.destinations[index] = destination
        self._send(m.Give(call.work, index))

    def given(self, work: int, index: int) -> Destination | None:
        """Return the destination of a round. None if it has none, or if the fetch has ended."""
        return self._run.destination(work, index)

    def flush(self) -> None:
        """Drop all bytes that were read, because the engine's caches are emptied."""
        self._send(m.Flush())

    def cancel(self, work: int, *, is_miss: bool = True) -> None:
        """End a lookup or a fetch soon. ``is_miss``: whether it counts as a miss."""
        self._send(m.Cancel(work, is_miss))

    # Writing

    def most_pages(self) -> int:
        """Return how many pages `write` takes at once."""
        return max(1, PAGES_BYTES // 4 // self._geometry.page_bytes)

    def write(
        self,
        first_page: int,
        previous_hash: bytes | None,
        hashes: Sequence[bytes],
        read: Callable[[torch.Tensor, torch.Tensor], bool],
        timeout_s: float,
    ) -> bool:
        """Hand over pages for writing. Waits for room for them. Return whether they are queued.

        ``read`` copies K and V of the pages into the given tensors, ``(pages, page_size, layers, heads, dim)`` each; it
        returns False if the pages are no longer available.
        """
        command = m.Write(next(self._numbers), first_page, previous_hash, b"".join(hashes), 0)
        return self._run.write(command, len(hashes), read, timeout_s)

    def clear(self) -> None:
        """Delete all segments of this rank from the store, and wait for it. Raises StoreError."""
        if fault := self._run.clear(m.Clear(next(self._numbers))):
            raise StoreError("io", fault)

    def close(self) -> None:
        """Write what is queued, within a few seconds, and end the data plane. Waits for it. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        run = self._run
        run.channel.send(m.Close())
        if not run.running.join(_CLOSE_S):
            logger.warning("kvfetch: the data plane did not end in %g s", _CLOSE_S)
            run.running.kill()
        self._thread.join(_CLOSE_S)

    # Lifecycle

    def _send(self, command: m.Command) -> None:
        self._run.channel.send(command)

    def _begin_run(self) -> _Run:
        """Start a data plane and wait until it serves. Raises KVFetchError."""
        ours, theirs = socket.socketpair()
        values, pages = Arena.create(VALUES_BYTES), Arena.create(PAGES_BYTES)
        run = _Run(Channel(ours), self._launch(Line(theirs, values, pages)), values, pages, self._geometry)
        try:
            run.channel.send(self._start)
            run.await_ready(self._closing)
        except BaseException:
            run.end()
            raise
        return run

    def _watch(self) -> None:
        """Serve each run until its end, then start the next one. Runs on the thread that receives."""
        backoff_s = _LEAST_BACKOFF_S
        while True:
            began_s = time.monotonic()
            self._run.serve(self._closing)
            self._run.end()
            if self._closing.is_set():
                return
            if time.monotonic() - began_s > _STEADY_S:
                backoff_s = _LEAST_BACKOFF_S
            logger.warning("kvfetch: the data plane ended; its work under way counts as misses, and it is restarted")
            metrics.DATA_PLANE_STARTS.inc()
            while True:
                if self._closing.wait(backoff_s):
                    return
                backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)
                try:
                    self._run = self._begin_run()
                    break
                except (KVFetchError, OSError) as e:
                    logger.warning("kvfetch: the data plane did not start: %s", e)


class _Run:
    """One data plane, from its start to its end, with its work under way."""

    def __init__(self, channel: Channel, running: Running, values: Arena, pages: Arena, geometry: KVGeometry) -> None:
        self.channel = channel
        self.running = running
        self._values = values
        self._pages = pages
        self._room = Room(pages.num_bytes)
        self._geometry = geometry
        self._lock = threading.Lock()
        self._ended = False  # guarded by the lock, like the work under way
        self._lookups: dict[int, Callable[[Find], None]] = {}
        self._fetches: dict[int, FetchCall] = {}
        self._answers: dict[int, Future[m.Taken | m.Cleared | None]] = {}

    # Commands, which fail at once after the end

    def look_up(self, command: m.LookUp, on_found: Callable[[Find], None]) -> None:
        if self._note(self._lookups, command.work, on_found):
            self.channel.send(command)
        else:
            _lose_lookup(command.work, on_found)

    def fetch(self, command: m.Fetch, call: FetchCall) -> None:
        if self._note(self._fetches, call.work, call):
            self.channel.send(command)
        else:
            _lose_fetch(call)

    def _note(self, under_way: dict[int, R], work: int, what: R) -> bool:
        """Record work under way. Return False if this run has ended."""
        with self._lock:
            if not self._ended:
                under_way[work] = what
            return not self._ended

    def write(
        self,
        command: m.Write,
        num_pages: int,
        read: Callable[[torch.Tensor, torch.Tensor], bool],
        timeout_s: float,
    ) -> bool:
        geometry = self._geometry
        offset = self._room.take(num_pages * geometry.page_bytes, timeout_s)
        if offset is None:
            return False
        answer = None
        try:
            if read(*self._pages.pages(offset, geometry, num_pages)):
                answer = self._ask(msgspec.structs.replace(command, offset=offset))
        finally:
            if answer is None:
                self._room.give_back(offset)
        if answer is None:
            return False
        # Not earlier, however long it takes: the data plane may still be copying the pages.
        answer.add_done_callback(lambda _: self._room.give_back(offset))
        taken = _result(answer, _ANSWER_S)
        return isinstance(taken, m.Taken) and taken.is_queued

    def clear(self, command: m.Clear) -> str:
        """Return what went wrong, or an empty string."""
        answer = self._ask(command)
        if answer is None:
            return "the data plane is being started"
        cleared = _result(answer, 2 * _ANSWER_S)
        return cleared.fault if isinstance(cleared, m.Cleared) else "the data plane did not answer"

    def _ask(self, command: m.Write | m.Clear) -> Future[m.Taken | m.Cleared | None] | None:
        """Send a command and return its future answer, None if the run ends first. None if it has already ended."""
        answer: Future[m.Taken | m.Cleared | None] = Future()
        if not self._note(self._answers, command.work, answer):
            return None
        self.channel.send(command)
        return answer

    # Events

    def await_ready(self, closing: threading.Event) -> None:
        """Wait until the data plane serves. Raises KVFetchError if it refuses the config or does not start."""
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s and not closing.is_set():
            for event in self._receive():
                match event:
                    case m.Ready():
                        return
                    case m.Refused():
                        raise _REFUSALS.get(event.kind, KVFetchError)(event.reason)
        raise KVFetchError(f"the data plane did not start within {_START_S:g} s")

    def serve(self, closing: threading.Event) -> None:
        """Process events until the data plane ends or hangs."""
        num_silent = 0
        while True:
            try:
                events = self._receive()
            except KVFetchError:
                return
            # Count ticks, not seconds: if a busy machine delays this thread, the data plane may well have answered.
            num_silent = 0 if events else num_silent + 1
            if num_silent > _SILENT_TICKS and not closing.is_set():
                logger.warning("kvfetch: the data plane does not answer")
                return
            if num_silent:
                self.channel.send(m.Ping())
            for event in events:
                try:
                    self._take_in(event)
                except Exception:  # must not end the thread that all callers depend on
                    logger.exception("kvfetch: processing event %s failed", type(event).__name__)

    def _receive(self) -> list[m.Event]:
        """Return new events. Raises KVFetchError if the data plane has ended."""
        events = self.channel.receive(_TICK_S)
        if events is None:
            raise KVFetchError("the data plane ended")
        return events

    def _take_in(self, event: m.Event) -> None:
        match event:
            case m.Piece():
                try:
                    self._land(event)
                finally:
                    self.channel.send(m.Free(event.offset))
            case m.Found():
                with self._lock:
                    on_found = self._lookups.pop(event.work, None)
                if on_found is not None:
                    on_found(Find(event.work, event.num_pages, Cost(event.transmit_s, event.decode_s)))
            case m.RoundHere():
                if (call := self._call(event.work)) is not None and not call.here[event.round].done():
                    call.here[event.round].set_result(Cost(event.transmit_s, event.decode_s))
            case m.RoundOver():
                if (call := self._call(event.work)) is not None:
                    _end_round(call, event.round, event.num_pages)
            case m.LinkHasRoom():
                if (call := self._call(event.work)) is not None and not call.link.done():
                    call.link.set_result(None)
            case m.FetchOver():
                with self._lock:
                    ended = self._fetches.pop(event.work, None)
                if ended is not None:
                    _end(ended)
            case m.Taken() | m.Cleared():
                with self._lock:
                    answer = self._answers.pop(event.work)
                answer.set_result(event)

    def _call(self, work: int) -> FetchCall | None:
        with self._lock:
            return self._fetches.get(work)

    def destination(self, work: int, index: int) -> Destination | None:
        call = self._call(work)
        return None if call is None else call.destinations.get(index)

    def _land(self, piece: m.Piece) -> None:
        """Copy values to their destination. Drop them if it no longer exists."""
        destination = self.destination(piece.work, piece.round)
        if destination is None:
            return
        geometry = self._geometry
        layers, heads = range(piece.first_layer, piece.end_layer), range(piece.first_head, piece.end_head)
        common = len(piece.pages) * geometry.page_size, len(layers), len(heads)
        shapes = ((*common, geometry.head_dim(t)) for t in TENSORS)
        values = self._values.views(piece.offset, geometry.torch_dtype, shapes)
        destination.sink.write(layers, heads, [destination.pool_pages[i] for i in piece.pages], CellValues(*values))

    def end(self) -> None:
        """End the data plane, and complete all its work under way as misses."""
        self.running.kill()
        self.running.join(_CLOSE_S)
        self.channel.close()
        self._room.close()
        with self._lock:
            self._ended = True
            lookups, self._lookups = self._lookups, {}
            fetches, self._fetches = self._fetches, {}
            answers, self._answers = self._answers, {}
        for work, on_found in lookups.items():
            _lose_lookup(work, on_found)
        for call in fetches.values():
            _lose_fetch(call)
        for answer in answers.values():
            answer.set_result(None)
        self._values.close()
        self._pages.close()


def _result(answer: Future[R], timeout_s: float) -> R | None:
    try:
        return answer.result(timeout_s)
    except TimeoutError:
        return None


def _lose_lookup(work: int, on_found: Callable[[Find], None]) -> None:
    metrics.MISSES.labels("lookup", "data_plane").inc()
    on_found(Find(work, 0, Cost(None, None)))


def _lose_fetch(call: FetchCall) -> None:
    metrics.MISSES.labels("fetch", "data_plane").inc()
    _end(call)


def _end_round(call: FetchCall, index: int, num_pages: int) -> None:
    if not call.here[index].done():
        call.here[index].set_result(None)
    if not call.over[index].done():
        call.over[index].set_result(num_pages)


def _end(call: FetchCall) -> None:
    for index in range(len(call.over)):
        _end_round(call, index, 0)
    for future in (call.link, call.end):
        if not future.done():
            future.set_result(None)
