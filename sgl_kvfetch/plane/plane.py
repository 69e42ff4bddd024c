"""The engine's side of the data plane: starts it, watches it and restarts it.

When a data plane dies, its work under way counts as misses. Only methods whose docstrings say so wait.
"""

from __future__ import annotations

import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import CellValues, Quantised, SideKey
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError, StoreError, UnsupportedError
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.arena import Arena, Room
from sgl_kvfetch.plane.channel import Channel
from sgl_kvfetch.plane.coded import CELL, StagedCode
from sgl_kvfetch.plane.fetch.sink import Destination
from sgl_kvfetch.plane.launch import Launch, Line
from sgl_kvfetch.plane.staging import StagedValues, region_views
from sgl_kvfetch.types import TENSORS, KVGeometry, TensorName

logger = logging.getLogger(__name__)

R = TypeVar("R")
A = TypeVar("A", bound=m.Found | m.SideOver | m.Staged | m.Taken | m.ClearOver)

# Shared memory for values on their way to the engine, and for pages on their way to the store: this, or twice the size
# of a page with all its side pages. Memory that is never used takes no space.
SHARED_BYTES = 64 << 20
_START_S = 60.0  # importing torch takes this long on a busy machine
_TICK_S = 0.25
# A data plane counts as hung after so many consecutive ticks without an answer: few if it does nothing in them, many if
# it runs, or waits for a core or a disk, as on an overloaded machine.
_IDLE_TICKS, _SILENT_TICKS = 12, 80
_SUSPECT_TICKS = 4  # after so many without an answer in which it does nothing, a spare data plane is started
_LEAST_BACKOFF_S, _MOST_BACKOFF_S = 0.1, 30.0
_STEADY_S = 5.0  # after a data plane has served this long, the backoff starts anew
_CLOSE_S = 10.0
_REFUSALS: dict[str, type[KVFetchError]] = {kind.__name__: kind for kind in (ConfigError, UnsupportedError)}
_WRITE_S = 1.0  # how long to wait for room for pages
_WRITES_S = 4.0  # after which no further part of the pages is begun: SGLang waits 10 s for this thread when it stops it
_ANSWER_S = 5.0  # how much longer a caller waits than the data plane's own deadline

ReadPages = Callable[[TensorName, Sequence[int]], torch.Tensor | None]
ReadQuantised = Callable[[range], Sequence[Quantised] | None]
ReadSide = Callable[[], torch.Tensor]  # returns uint8, (bytes,)
TakeSide = Callable[[int, torch.Tensor], None]


@dataclass(slots=True, eq=False)
class FetchCall:
    """A fetch under way. Other threads complete the futures; every future is completed, whatever happens.

    ``here``: for each round, the cost of its pages and all later ones, when its first bytes are here; None if it ended
    before. ``over``: for each round, how many of its pages, from the first on, are restored; nothing is written after
    that. ``link``: done when the link could serve another fetch as well. ``certain``: true as `messages.Certain` says,
    false if the fetch ended before. ``end``: done when the fetch is over.
    """

    work: int
    here: list[Future[m.Cost | None]]
    over: list[Future[int]]
    link: Future[None] = field(default_factory=Future)
    certain: Future[bool] = field(default_factory=Future)
    end: Future[None] = field(default_factory=Future)
    destinations: dict[int, Destination] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)  # guards what follows
    _completed: set[Future[Any]] = field(default_factory=set)

    def complete(self, future: Future[R], result: R) -> None:
        """Complete a future unless that was done. Messages complete futures on one thread, and the data plane's end on
        another: whichever comes first."""
        with self._lock:
            is_first = future not in self._completed
            self._completed.add(future)
        if is_first:
            future.set_result(result)  # not with the lock held: it calls back

    def take_in(self, event: m.RoundHere | m.RoundOver | m.LinkHasRoom | m.Certain) -> None:
        match event:
            case m.RoundHere():
                self.complete(self.here[event.round], event.cost)
            case m.RoundOver():
                self.end_round(event.round, event.num_pages)
                if event.round == len(self.over) - 1:
                    self.end_transmission()
            case m.LinkHasRoom():
                self.complete(self.link, None)
            case m.Certain():
                self.complete(self.certain, True)

    def lose(self) -> None:
        metrics.MISSES.labels("fetch", "data_plane").inc()
        self.end_all()

    def end_round(self, index: int, num_pages: int) -> None:
        self.complete(self.here[index], None)
        self.complete(self.over[index], num_pages)

    def end_all(self) -> None:
        for index in range(len(self.over)):
            self.end_round(index, 0)
        self.complete(self.link, None)
        self.end_transmission()

    def end_transmission(self) -> None:
        self.complete(self.certain, False)
        self.complete(self.end, None)


class DataPlane:
    """One rank's data plane. Call ``close`` at the end."""

    def __init__(self, start: m.Start, geometry: KVGeometry, launch: Launch, staging_bytes: int = 0) -> None:
        """Start the data plane and wait until it serves. ``staging_bytes``: the shared memory for values that wait to
        be taken. Raises KVFetchError if the data plane refuses the config or fails."""
        self._start = start
        self._geometry = geometry
        self._launch = launch
        self._staging_bytes = staging_bytes
        self._numbers = itertools.count(1)
        self._closing = threading.Event()
        self._spare: _Run | None = None  # launched, but not started
        self.num_losses = 0  # data planes that ended before all pages that they had taken were written
        self._shown: m.ShowPrompts | None = None
        self._prepared: _Prepared | None = None
        self._choosing = threading.Lock()  # held to replace `_run`
        self.has_switched = False
        self.on_switch: Callable[[], None] = lambda: None  # what is known of the store's pages holds no longer
        self._run = self._begin_run()  # has ended while the next one is being started
        self._former: threading.Thread | None = None  # serves the data plane before the last switch until its end
        self._thread = self._begin_watch()

    # Reading

    def look_up(
        self,
        hashes: Sequence[bytes],
        on_found: Callable[[m.Found], None],
        *,
        trailing: Mapping[str, int] | None = None,
        position: int | None = None,
    ) -> int:
        """Find the longest stored run of these pages. ``on_found`` is called once, on any thread. Return the number.
        ``trailing``, ``position``: as in `messages.LookUp`."""
        work = next(self._numbers)
        command = m.LookUp(work, b"".join(hashes), dict(trailing or {}), position)
        found = self._run.ask(command, m.Found(work, 0, m.Cost(None, None)))
        found.add_done_callback(lambda found: on_found(found.result()))
        return work

    def read_ahead(self, lookup: int) -> None:
        """Begin to read the pages that a lookup found. They will be fetched by their hashes."""
        self._send(m.ReadAhead(lookup))

    def forget_lookup(self, lookup: int) -> None:
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
        request: timeline.Request = timeline.NOBODY,
        early_s: float = 0.0,
        destination: Destination | None = None,
        compute_s: float = math.inf,
    ) -> FetchCall:
        """Begin to transmit pages for ``request``. ``destination``: the first round's, if it has one already; see
        `give`. Other arguments as in `messages.FetchPages`."""
        work = next(self._numbers)
        call = FetchCall(work, [Future() for _ in round_ends], [Future() for _ in round_ends])
        if destination is not None:
            call.destinations[0] = destination
        if found is None:
            call.complete(call.link, None)
        command = m.FetchPages(
            work,
            b"".join(hashes),
            tuple(round_ends),
            deadline_s,
            found,
            first_page,
            request.id,
            request.traceparent,
            early_s,
            destination is not None,
            compute_s,
        )
        self._run.fetch(command, call)
        return call

    def stage(
        self,
        hashes: Sequence[bytes],
        on_staged: Callable[[StagedValues], None],
        *,
        saved_s: Sequence[tuple[int, float]] = (),
        urgency: int = 0,
        request: timeline.Request = timeline.NOBODY,
        is_idle: bool = False,
    ) -> int:
        """Restore the longest stored run of these pages into shared memory. ``on_staged`` is called once, on the thread
        that steps unless the data plane ends. Return the number, for `unstage`. ``request``: for the timeline. Other
        arguments as in `messages.Stage`."""
        work, run = next(self._numbers), self._run
        command = m.Stage(work, b"".join(hashes), tuple(saved_s), urgency, request.id, request.traceparent, is_idle)
        staged = run.ask(command, m.Staged(work, 0, 0, 0, "failed"))
        staged.add_done_callback(lambda staged: on_staged(run.staged_values(staged.result())))
        return work

    def unstage(self, work: int, *, is_sound: bool = True) -> None:
        """End the staging of some pages soon, or free their memory. Nothing may read it afterwards. ``is_sound``: as in
        `messages.Unstage`."""
        self._send(m.Unstage(work, is_sound))

    def fetch_side(self, pool: str, hashes: Sequence[bytes], deadline_s: float, take: TakeSide) -> Future[m.SideOver]:
        """Begin to fetch pages from a side pool. ``take`` gets each page, uint8 ``(bytes,)``, which it must copy, with
        its index, on another thread; not after the future is done."""
        work = next(self._numbers)
        command = m.FetchSide(work, pool, b"".join(hashes), deadline_s)
        return self._run.ask(command, m.SideOver(work, ()), take)

    def give(self, call: FetchCall, index: int, destination: Destination) -> None:
        """Restore a round into ``destination``. Nothing is written to it after the round is over."""
        call.destinations[index] = destination
        self._send(m.Give(call.work, index))

    def flush(self) -> None:
        """Drop all bytes that were read, because the engine's caches are emptied."""
        self._send(m.Flush())

    def cancel(self, work: int, reason: str = "cancelled") -> None:
        """End a lookup or a fetch soon. ``reason``: as in `messages.Cancel`."""
        self._send(m.Cancel(work, reason))

    # Writing

    def write(
        self,
        first_page: int,
        previous_hash: bytes | None,
        hashes: Sequence[bytes],
        pool_pages: Sequence[int],
        read: ReadPages,
        sides: Mapping[SideKey, ReadSide] | None = None,
        read_quantised: ReadQuantised | None = None,
    ) -> int:
        """Queue consecutive pages of a sequence for writing. Return how many, from the first on, were queued. Waits a
        little for room.

        ``first_page``: position in the sequence. ``previous_hash``: hash of the page before, None at the sequence's
        start. ``pool_pages``: their page numbers in the pool. ``read`` returns a copy of pages of the pool, or None if
        they are no longer available. ``sides``: how to read the side pages of some of these pages, which are counted
        from the first. ``read_quantised`` goes before ``read``: it returns the parts of these pages, also counted from
        the first, for each cell in storage order; None if ``read`` is to be used.
        """
        started_s = time.monotonic()
        sides = sides or {}
        for part in self._parts(len(hashes), sides):
            if part.start and time.monotonic() > started_s + _WRITES_S:
                return part.start
            theirs = {(pool, page - part.start): x for (pool, page), x in sides.items() if page in part}
            run = slice(part.start, part.stop)
            command = m.Write(
                next(self._numbers), first_page + part.start, previous_hash, b"".join(hashes[run]), 0, tuple(theirs)
            )
            left_s = max(0.0, started_s + _WRITE_S - time.monotonic())
            quantised = read_quantised and partial(read_quantised, part)
            if not self._run.write(command, pool_pages[run], read, quantised, list(theirs.values()), left_s):
                return part.start
            previous_hash = hashes[run][-1]
        return len(hashes)

    def _parts(self, num_pages: int, sides: Iterable[SideKey]) -> Iterator[range]:
        """Cut pages into runs that take a quarter of the shared memory, or one page each."""
        sizes = [self._geometry.page_bytes] * num_pages
        for pool, page in sides:
            sizes[page] += self._start.sides[pool]
        first = num_bytes = 0
        for page, size in enumerate(sizes):
            if page > first and num_bytes + size > SHARED_BYTES // 4:
                yield range(first, page)
                first, num_bytes = page, 0
            num_bytes += size
        if num_pages:
            yield range(first, num_pages)

    def clear(self) -> None:
        """Delete all segments of this rank from the store, and wait for it. Raises StoreError."""
        work = next(self._numbers)
        cleared = self._run.ask(m.Clear(work), m.ClearOver(work, "the data plane ended"))
        try:
            fault = cleared.result(2 * _ANSWER_S).fault
        except TimeoutError:
            fault = "the data plane did not answer"
        if fault:
            raise StoreError("io", fault)

    # Finding a profile, and serving by it

    @property
    def taken_profile(self) -> m.ProfileTaken | None:
        """The profile that was found for the engine's weights, as `messages.Start` has asked."""
        return self._run.profile

    def show_prompts(self, windows: Sequence[Sequence[bytes]]) -> None:
        """Let the data plane calibrate on these prompts: see `messages.ShowPrompts`."""
        self._shown = m.ShowPrompts(tuple(map(tuple, windows)))
        self._send(self._shown)

    def pause_calibration(self, *, is_paused: bool) -> None:
        self._send(m.PauseCalibration(is_paused))

    def take_profile(self, digest: str) -> None:
        """Let the data plane take this profile, which another rank has chosen."""
        self._send(m.TakeProfile(digest))

    def prepare(self, make: Callable[[], tuple[m.Start, Launch]]) -> None:
        """Start a second data plane, on a thread, for `switch`. ``make`` returns what it is started with; it may take
        its time, and raise KVFetchError: then there is nothing to switch to."""
        threading.Thread(target=self._prepare, args=(make,), name="kvfetch-switch", daemon=True).start()

    @property
    def is_prepared(self) -> bool:
        return self._prepared is not None

    def switch(self) -> None:
        """Serve by the data plane that was prepared. The former one writes what is queued, and ends; its other work
        under way counts as misses. Never waits. Call on the thread that steps."""
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        with self._choosing:
            former, self._run = self._run, prepared.run
            self._start, self._launch, self._shown = prepared.start, prepared.launch, None
        self.has_switched = True
        self.num_losses += 1  # what it has queued is of no use to the next one
        self.on_switch()
        former.channel.send(m.Close())
        self._former, self._thread = self._thread, self._begin_watch()

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
        if self._former is not None:
            self._former.join(_CLOSE_S)
        if self._prepared is not None:
            self._prepared.run.end()

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def step(self) -> None:
        """Complete what the events for the scheduler's steps say: those that have come, a bounded number. Only if
        `messages.Start` has said ``has_steps``. Never waits."""
        self._run.step()

    # Lifecycle

    def _send(self, command: m.Command) -> None:
        self._run.channel.send(command)

    def _begin_run(self) -> _Run:
        """Start a data plane, the spare one if there is one, and wait until it serves. Raises KVFetchError."""
        spare, self._spare = self._spare, None
        if spare is not None and spare.launch is not self._launch:  # from before a switch
            spare.end()
            spare = None
        run = spare or self._new_run()
        try:
            run.channel.send(self._start)
            run.await_ready(self._closing)
        except BaseException:
            run.end()
            raise
        if self._shown is not None:
            run.channel.send(self._shown)
        return run

    def _prepare(self, make: Callable[[], tuple[m.Start, Launch]]) -> None:
        run = None
        try:
            start, launch = make()
            run = self._new_run(launch)
            run.channel.send(start)
            run.await_ready(self._closing)
        except (KVFetchError, OSError) as e:
            logger.warning("kvfetch: the profile cannot be used, and this server stores with 'exact': %s", e)
            if run is not None:
                run.end()
            return
        self._prepared = _Prepared(run, start, launch)
        if self._closing.is_set():
            run.end()

    def _begin_watch(self) -> threading.Thread:
        thread = threading.Thread(target=self._watch, args=(self._run,), name="kvfetch-data", daemon=True)
        thread.start()
        return thread

    def _watch(self, run: _Run) -> None:
        """Serve a run until its end, then start the next one, unless that is served already. Runs on the thread that
        receives."""
        use_one_thread()
        backoff_s = _LEAST_BACKOFF_S
        try:
            while True:
                began_s = time.monotonic()
                run.serve(self._closing, self._launch_spare)
                self.num_losses += run.end()
                if self._closing.is_set() or run is not self._run:
                    return
                if time.monotonic() - began_s > _STEADY_S:
                    backoff_s = _LEAST_BACKOFF_S
                logger.warning("kvfetch: the data plane ended; its work under way counts as misses; it is restarted")
                metrics.DATA_PLANE_STARTS.inc()
                while True:
                    if self._closing.wait(backoff_s):
                        return
                    backoff_s = min(_MOST_BACKOFF_S, 2 * backoff_s)
                    if run is not self._run:
                        return
                    try:
                        following = self._begin_run()
                    except (KVFetchError, OSError) as e:
                        logger.warning("kvfetch: the data plane did not start: %s", e)
                        continue
                    with self._choosing:
                        is_wanted = run is self._run
                        if is_wanted:
                            self._run = run = following
                    if not is_wanted:
                        following.end()
                        return
                    break
        finally:
            if self._spare is not None:
                self._spare.end()

    def _launch_spare(self) -> None:
        """Launch a spare data plane, whose imports are done if this one turns out to hang. If not, it is kept."""
        if self._spare is None and not self._closing.is_set():
            try:
                self._spare = self._new_run()
            except OSError as e:
                logger.warning("kvfetch: a spare data plane cannot be started: %s", e)

    def _new_run(self, launch: Launch | None = None) -> _Run:
        page_bytes = self._geometry.page_bytes + sum(self._start.sides.values())
        shared_bytes = max(SHARED_BYTES, 2 * page_bytes)
        value_bytes = self._staging_bytes or shared_bytes
        return _Run(launch or self._launch, self._geometry, self._start.sides, shared_bytes, value_bytes)


_Work = m.LookUp | m.FetchPages | m.FetchSide | m.Stage | m.Write | m.Clear


@dataclass(slots=True, eq=False)
class _Asked:
    """A command that one event answers. ``lost``: that event, if the data plane ends first."""

    lost: m.Found | m.SideOver | m.Staged | m.Taken | m.ClearOver
    take: TakeSide | None
    answer: Future[Any] = field(default_factory=Future)

    def lose(self) -> None:
        if isinstance(self.lost, m.Found | m.SideOver | m.Staged):
            stage = "lookup" if isinstance(self.lost, m.Found) else "fetch"
            metrics.MISSES.labels(stage, "data_plane").inc()
        self.answer.set_result(self.lost)


class _Prepared(NamedTuple):
    run: _Run
    start: m.Start
    launch: Launch


class _Run:
    """One data plane, from its start to its end, with its work under way."""

    def __init__(
        self, launch: Launch, geometry: KVGeometry, sides: Mapping[str, int], page_bytes: int, value_bytes: int
    ) -> None:
        """Launch a data plane, which waits for ``Start``. ``page_bytes``, ``value_bytes``: the shared memory for pages
        on their way to the store, and for values on their way to the engine."""
        commands, events = socket.socketpair(), socket.socketpair()
        self.launch = launch
        self.channel = Channel(commands[0], events[0])
        self._values, self._pages = Arena.create(value_bytes), Arena.create(page_bytes)
        self._room = Room(page_bytes)
        self._geometry = geometry
        self._sides = sides
        self._lock = threading.Lock()
        self._ended = False  # guarded by the lock, like the work under way
        self._asked: dict[int, _Asked] = {}
        self._fetches: dict[int, FetchCall] = {}
        self.profile: m.ProfileTaken | None = None
        self._num_queued = 0  # pages that the data plane has taken and not yet written or dropped
        self.running = launch(Line(commands[1], events[1], self._values, self._pages, self.destination))

    # Commands, which fail at once after the end

    def ask(
        self, command: m.LookUp | m.FetchSide | m.Stage | m.Write | m.Clear, lost: A, take: TakeSide | None = None
    ) -> Future[A]:
        """Send a command. Return the event that answers it, ``lost`` if the data plane ends first. ``take``: as in
        `DataPlane.fetch_side`."""
        asked = _Asked(lost, take)
        if not self._begin(command, self._asked, asked):
            asked.lose()
        return asked.answer

    def fetch(self, command: m.FetchPages, call: FetchCall) -> None:
        if not self._begin(command, self._fetches, call):
            call.lose()

    def _begin(self, command: _Work, under_way: dict[int, Any], work: Any) -> bool:
        """Record work as under way and send its command. Return False if the data plane has ended."""
        with self._lock:
            if self._ended:
                return False
            under_way[command.work] = work
        self.channel.send(command)
        return True

    def write(
        self,
        command: m.Write,
        pool_pages: Sequence[int],
        read: ReadPages,
        read_quantised: Callable[[], Sequence[Quantised] | None] | None,
        read_sides: Sequence[ReadSide],
        timeout_s: float,
    ) -> bool:
        """Hand over pages for writing. Waits for room for them. Return whether they are queued."""
        sizes = [self._sides[pool] for pool, _ in command.sides]
        sides_at = len(pool_pages) * self._geometry.page_bytes
        offset = self._room.allocate(sides_at + sum(sizes), timeout_s)
        if offset is None:
            return False
        with ExitStack() as undo:
            undo.callback(self._room.free, offset)
            cells = read_quantised() if read_quantised is not None else None
            sizes_of_cells = self._copy_quantised(offset, sides_at, cells or ())
            if not sizes_of_cells and not self._copy(offset, pool_pages, read):
                return False
            views = self._pages.views(offset + sides_at, torch.uint8, ((size,) for size in sizes))
            for read_side, into in zip(read_sides, views, strict=True):
                into.copy_(read_side())
            undo.pop_all()
        command = msgspec.structs.replace(command, offset=offset, cells=sizes_of_cells)
        taken = self.ask(command, m.Taken(command.work, 0))
        # Not earlier, however long it takes: the data plane may still be copying the pages.
        taken.add_done_callback(lambda _: self._room.free(offset))
        try:
            return taken.result(_ANSWER_S).num_queued > 0
        except TimeoutError:
            return False

    def _copy_quantised(self, offset: int, most_bytes: int, cells: Sequence[Quantised]) -> tuple[tuple[int, ...], ...]:
        """Copy the parts of cells into the shared memory. Return their sizes; none if they take more than the values,
        as where all tokens are exact."""
        flat = [x for cell in cells for x in cell]
        if sum(x.nbytes for x in flat) > most_bytes:
            return ()
        for x, into in zip(flat, self._pages.views(offset, torch.uint8, (x.shape for x in flat)), strict=True):
            into.copy_(x)
        return tuple(tuple(x.nbytes for x in cell) for cell in cells)

    def _copy(self, offset: int, pool_pages: Sequence[int], read: ReadPages) -> bool:
        """Copy pages into the shared memory. Return False if they are no longer available."""
        for tensor, into in zip(TENSORS, self._pages.pages(offset, self._geometry, len(pool_pages)), strict=True):
            values = read(tensor, pool_pages)
            if values is None:
                return False
            into.copy_(values)
        return True

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

    def serve(self, closing: threading.Event, on_suspicion: Callable[[], None]) -> None:
        """Process events until the data plane ends or hangs. ``on_suspicion`` is called when it may hang."""
        num_silent = num_idle = 0
        while True:
            try:
                events = self._receive()
            except KVFetchError:
                return
            # Count ticks, not seconds: if a busy machine delays this thread, the data plane may well have answered.
            if events:
                num_silent = num_idle = 0
            else:
                num_silent += 1
                num_idle += not self.running.is_busy()
                if num_idle == _SUSPECT_TICKS:
                    on_suspicion()
            if (num_idle > _IDLE_TICKS or num_silent > _SILENT_TICKS) and not closing.is_set():
                logger.warning("kvfetch: the data plane does not answer")
                return
            if num_silent:
                self.channel.send(m.Ping())
            self._take_in_all(events)

    def step(self) -> None:
        if self._asked or self._fetches:
            try:
                self._take_in_all(self.channel.receive_now())
            except FormatError:
                logger.exception("kvfetch: the data plane sends invalid bytes")
                self.running.kill()

    def _receive(self) -> list[m.Event]:
        """Return new events. Raises KVFetchError if the data plane has ended."""
        events = self.channel.receive(_TICK_S)
        if events is None:
            raise KVFetchError("the data plane ended")
        return events

    def _take_in_all(self, events: Iterable[m.Event]) -> None:
        for event in events:
            try:
                self._take_in(event)
            except Exception:  # must not end the thread, on which others depend
                logger.exception("kvfetch: processing event %s failed", type(event).__name__)

    def _take_in(self, event: m.Event) -> None:
        match event:
            case m.Piece():
                try:
                    self._land(event)
                finally:
                    self.channel.send(m.FreePiece(event.offset))
            case m.SidePiece():
                try:
                    with self._lock:
                        asked = self._asked.get(event.work)
                    if asked is not None and asked.take is not None:
                        asked.take(event.page, self._values.view(event.offset, torch.uint8, (event.num_bytes,)))
                finally:
                    self.channel.send(m.FreePiece(event.offset))
            case m.Found() | m.SideOver() | m.Staged() | m.Taken() | m.ClearOver():
                with self._lock:
                    asked = self._asked.pop(event.work, None)
                if isinstance(event, m.Taken):
                    self._num_queued += event.num_queued
                if asked is not None:  # else the data plane has ended, as another thread has noticed
                    asked.answer.set_result(event)
            case m.ProfileTaken():
                self.profile = event
            case m.Settled():
                self._num_queued -= event.num_pages
            case m.RoundHere() | m.RoundOver() | m.LinkHasRoom() | m.Certain():
                if (call := self._call(event.work)) is not None:
                    call.take_in(event)
                    if call.link.done() and call.end.done():  # each on a thread of its own, perhaps
                        with self._lock:
                            self._fetches.pop(call.work, None)

    def _call(self, work: int) -> FetchCall | None:
        with self._lock:
            return self._fetches.get(work)

    def destination(self, work: int, index: int) -> Destination | None:
        """Return the destination of a round. None if it has none, or if the fetch has ended."""
        call = self._call(work)
        return None if call is None else call.destinations.get(index)

    def staged_values(self, staged: m.Staged) -> StagedValues:
        """Return what was staged. It stays readable when the data plane has ended."""
        if staged.num_cells:
            tables = self._values.view(staged.tables, torch.uint8, (staged.tables_bytes,))
            cells = np.frombuffer(tables.numpy().data, dtype=CELL, count=staged.num_cells)
            code = StagedCode(cells, tables[cells.nbytes :])
            return StagedValues(staged.num_pages, staged.num_found, staged.end, self._values.whole, code=code)
        room_pages = staged.num_found if staged.num_pages else 0
        values = region_views(self._values, staged.offset, self._geometry, room_pages)
        return StagedValues(staged.num_pages, staged.num_found, staged.end, self._values.whole, values)

    def _land(self, piece: m.Piece) -> None:
        """Copy values to their destination. Drop them if it no longer exists. If that fails, end the fetch."""
        call = self._call(piece.work)
        destination = None if call is None else call.destinations.get(piece.round)
        if call is None or destination is None:
            return
        geometry = self._geometry
        layers, heads = range(piece.first_layer, piece.end_layer), range(piece.first_head, piece.end_head)
        common = len(piece.pages) * geometry.page_size, len(layers), len(heads)
        shapes = ((*common, geometry.head_dim(t)) for t in TENSORS)
        values = self._values.views(piece.offset, geometry.torch_dtype, shapes)
        try:
            pages = [destination.pool_pages[i] for i in piece.pages]
            if destination.sink.write(layers, heads, pages, CellValues(*values)):
                destination.count(layers, heads, len(pages))
        except BaseException:
            call.end_all()
            raise

    def end(self) -> bool:
        """End the data plane, and complete all its work under way as misses. Return whether it has lost pages that it
        had taken for writing."""
        self.running.kill()
        self.running.join(_CLOSE_S)
        self.channel.close()
        self._room.close()
        with self._lock:
            self._ended = True
            lost: list[_Asked | FetchCall] = [*self._asked.values(), *self._fetches.values()]
            self._asked, self._fetches = {}, {}
        for each in lost:
            each.lose()
        self._values.close()
        self._pages.close()
        if self._num_queued > 0:
            metrics.WRITTEN_PAGES.labels("dropped_data_plane").inc(self._num_queued)
            logger.warning("kvfetch: %d pages that were queued for writing are lost", self._num_queued)
        return self._num_queued > 0
