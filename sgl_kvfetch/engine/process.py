"""One data plane as the engine sees it, from its launch to its end, with its work under way.

Several threads ask it for work. ``kvfetch-data`` receives the answers, completes what waits for them (`Awaited`), and
watches over the data plane. In device mode the scheduler looks for stagings in its steps, and receives these itself:
a thread in between would have to wait for the interpreter's lock. What must hold, whatever happens:

* Each piece of work is answered once: by its event, or, if the data plane ends first, as lost. So nobody waits for an
  answer that never comes. A lock guards the tables of work under way; answers are completed after it is released,
  since they call back.
* The data plane may end at any moment, also between two bytes of a message. Then `serve` returns, `end` completes what
  is left, and commands that come later fail at once.
* The memory for pages is the write queue. It is freed only when the data plane has said that it has encoded them,
  however long that takes.
* A data plane that lives but does not answer counts as ended. Silence is counted in ticks in which this thread had
  nothing to read, not in seconds: on a busy machine this thread may be the late one.

It is a process beside the engine, or, in tests, a thread of the engine's process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.errors import FormatError, KVFetchError
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.protocol import Arena, KVFetchConfig, Line, Room, StagedValues, TakenProfile, messages as m
from sgl_kvfetch.protocol.arena import side_views
from sgl_kvfetch.protocol.messages import Channel
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.status import Audits
from sgl_kvfetch.types import KVGeometry, SideKey

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


class Running(Protocol):
    """A data plane that was started."""

    def kill(self) -> None:
        """End it at once, whatever it is doing."""

    def join(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for its end. Return whether it has ended."""

    def is_busy(self) -> bool:
        """Return whether its event loop has run, or waited for a core or a disk, since the last call."""


Launch = Callable[[Line], Running]


class DataPlaneProcess:
    """A separate process. When the engine's process ends, however it ends, the socket closes, and this ends too."""

    def __init__(self, line: Line) -> None:
        # -P: the installed package, and not a folder of this name where SGLang was started, such as a checkout.
        command = [sys.executable, "-P", "-m", "sgl_kvfetch.plane", *line.files.values()]
        try:
            self.process = subprocess.Popen(command, pass_fds=line.files, stdin=subprocess.DEVNULL)
        finally:
            line.commands.close()
            line.staged.close()
        self._main_thread = Path(f"/proc/{self.process.pid}/task/{self.process.pid}")
        self._times = ""

    def kill(self) -> None:
        self.process.kill()

    def is_busy(self) -> bool:
        try:  # Linux knows how long the main thread ran, how long it waited for a core, and what it is doing
            before, self._times = self._times, (self._main_thread / "schedstat").read_text()
            state = (self._main_thread / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return self._times != before or state in "RD"

    def join(self, timeout_s: float) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout_s)
            if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
                # Remove its gauges from SGLang's metrics: a killed process cannot set its queues to empty. Imported
                # only after SGLang has set the folder: the client decides at import what it writes to.
                from prometheus_client.multiprocess import mark_process_dead

                with contextlib.suppress(FileNotFoundError):  # another thread that joins removes them, too
                    mark_process_dead(self.process.pid)  # type: ignore[no-untyped-call]
            return True
        return False


_numbers = itertools.count(1)  # of work
A = TypeVar("A", bound=m.Answer)
E = TypeVar("E", m.ProfileTaken, m.Ready)

_TICK_S = 0.25
_WORD_S = 0.001  # for a data plane to say that a prompt lies in its memory
# A data plane counts as hung after so many ticks in a row without an answer: the first number of them if it does
# nothing in them, the second if it runs, or waits for a core or a disk, as on an overloaded machine. A start is one
# long silence: it imports torch, and may wait for a compiler or a driver.
_RUNNING_TICKS, _START_TICKS = (12, 80), (240, 960)
_LEAVING_TICKS = 40, 80  # one that writes what is queued, and takes no commands
CLOSE_S = 10.0

# Shared memory for side pages on their way to the engine: this, or twice the size of a page with all its side pages.
# Memory that is never used takes no space.
SHARED_BYTES = 64 << 20


@dataclass(frozen=True)
class Setup:
    """What the data planes of one rank have in common. ``queue_bytes``, ``cache_bytes``: of the config. ``pool_files``:
    as in `Line`."""

    launch: Launch
    geometry: KVGeometry
    sides: Mapping[str, int] = field(default_factory=dict)  # the bytes of a page in each side pool
    queue_bytes: int = KVFetchConfig.model_fields["write_queue_bytes"].default
    staging_bytes: int = 0  # of the memory for values that wait to be taken, if prompts are staged
    cache_bytes: int = 0
    pool_files: tuple[tuple[int, int], ...] = ()

    @property
    def page_bytes(self) -> int:
        """The shared memory for pages on their way to the store, which is the write queue."""
        return max(self.queue_bytes, self._least_bytes)

    @property
    def value_bytes(self) -> int:
        """The shared memory for what is on its way to the engine, without the cache."""
        return self.staging_bytes or max(SHARED_BYTES, self._least_bytes)

    @property
    def side_part_bytes(self) -> int:
        """The bytes of the side pages that one command brings. The first ones of all pools may be asked for at once."""
        return self.value_bytes // (2 * max(1, len(self.sides)))

    @property
    def _least_bytes(self) -> int:
        return 2 * (self.geometry.page_bytes + sum(self.sides.values()))


class EndedError(KVFetchError):
    """The data plane ended, or did not start in time. Another one may fare better."""


# ``read(pages, memory, offset)`` copies pages of the pool into uint8 ``memory``, from a byte on, as `pages_in` finds
# them. It returns False if they are no longer available.
ReadPages = Callable[[Sequence[int], torch.Tensor, int], bool]
ReadSide = Callable[[], torch.Tensor | None]  # returns uint8, (bytes,); None if it is no longer available


@dataclass(frozen=True)
class Quantising:
    """Quantises the pages of a write into shared memory.

    Attributes:
        num_rows: The integers of a token, by cell in storage order.
        into: ``into(pages, memory, offset)`` quantises some of the pages, which are counted from the write's first.
            From a byte of ``memory`` on, uint8, it writes the exponents of all cells, ``(cells, tokens)``, and each
            cell's integers, ``(rows, tokens)``. It returns each cell's exact tokens, uint8 ``(bytes,)``; None if the
            pages are to be read as values.
    """

    num_rows: Sequence[int]
    into: Callable[[range, torch.Tensor, int], Sequence[torch.Tensor] | None]

    @property
    def token_bytes(self) -> int:
        """The bytes of a token, without exact ones."""
        return len(self.num_rows) + sum(self.num_rows)


class Awaited(Future[A]):
    """The event that answers a command. Wait for no `Taken`, and not on the thread ``kvfetch-data``."""

    def __init__(self, peer: Peer, lost: A) -> None:
        """``lost``: the event, if the data plane ends first."""
        super().__init__()
        self.peer = peer
        self.work = lost.work
        self._lost = lost

    def unstage(self) -> None:
        """End the work soon, or free what it has staged."""
        self.peer.channel.send(m.Unstage(self.work))

    def lose(self, reason: Reason = Reason.DATA_PLANE) -> None:
        """Answer with ``lost``. ``reason``: why pages are missing, if the answer says so."""
        lost = self._lost
        if isinstance(lost, m.Found | m.Fetched | m.Staged):
            metrics.MISSES.labels("lookup" if isinstance(lost, m.Found) else "fetch", reason).inc()
            lost = msgspec.structs.replace(lost, reason=reason)
        self.set_result(lost)


class _Silence:
    """Counts ticks in which a data plane says nothing. They are no measure of time: if a busy machine delays the thread
    that counts, the data plane may well have answered."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._num_ticks = self.num_idle = 0

    def broken_by(self, events: list[m.Event]) -> list[m.Event]:
        """Take in what was said in a tick. Return it."""
        if events:
            self._num_ticks = self.num_idle = 0
        else:
            self._num_ticks += 1
            self.num_idle += not self._running.is_busy()
        return events

    def is_longer(self, most_idle: int, most_ticks: int) -> bool:
        """``most_idle``: of the ticks in which the data plane does nothing. ``most_ticks``: of all."""
        return self.num_idle > most_idle or self._num_ticks > most_ticks


class Peer:
    """One data plane, from its launch to its end, with its work under way. It is asked for a profile at most, then told
    to `start`, and serves from then on. ``on_loss`` is called when the store takes pages again after it has failed to
    take some."""

    def __init__(self, setup: Setup) -> None:
        """Launch a data plane, which waits for ``Start``. Call ``end`` at the end."""
        self.setup = setup
        self.on_loss: Callable[[], None] = lambda: None
        commands, staged = socket.socketpair(), socket.socketpair()
        self.channel = Channel(commands[0], staged[0])
        self.values = Arena.create(setup.value_bytes + setup.cache_bytes)
        self._pages = Arena.create(setup.page_bytes)
        self._room = Room(setup.page_bytes)
        self._lock = threading.Lock()
        self._ended = False  # or leaves; guarded by the lock, like the work under way
        self._asked: dict[int, Awaited[Any]] = {}
        self._new: dict[int, bool] = {}  # stagings since the last step: whether they are near
        self.found_profile = ""
        self.audits: Audits | None = None
        self.has_lost = False  # the store has failed to take pages, and has taken none since
        self._num_queued = 0  # pages that the data plane has taken and not yet written or dropped
        try:
            self.running = setup.launch(Line(commands[1], staged[1], self.values, self._pages, setup.pool_files))
        except BaseException:
            self._close_files()
            raise

    # Before it serves

    def take_profile(self, config: KVFetchConfig, watch: m.Watch, digest: str | None = None) -> TakenProfile | None:
        """Return the newest profile that has what ``watch`` needs, or the one with this digest, as a file of this
        machine: from the store, or, while that cannot be asked, the one that was taken last. None if the store has
        none. Waits, as long as the store and the profile take.

        Raises StoreError if the store cannot be asked and there is no copy here, and another KVFetchError if no copy
        can be kept, or if the data plane ends.
        """
        self.channel.send(m.TakeProfile(config.as_json(), watch, digest))
        return self._await_answer(m.ProfileTaken, threading.Event()).taken

    def start(self, start: m.Start, closing: threading.Event) -> None:
        """Wait until the data plane serves. Raises EndedError, or another KVFetchError if it refuses the config."""
        self.channel.send(start)
        self._await_answer(m.Ready, closing)

    def _await_answer(self, kind: type[E], closing: threading.Event) -> E:
        silence = _Silence(self.running)
        while not silence.is_longer(*_START_TICKS) and not closing.is_set():
            for event in silence.broken_by(self._receive()):
                match event:
                    case m.Refused():
                        raise event.error
                    case m.AuditsTold():  # by those who served before
                        self._take_in(event)
                    case _ if isinstance(event, kind):
                        return event
        raise EndedError("the data plane did not start")

    # Commands, which fail at once after the end

    def ask(self, command: m.Stage | m.FetchPages | m.FetchSide | m.Write | m.Clear, lost: A) -> Awaited[A]:
        """Send a command. Return the event that answers it, ``lost`` if the data plane ends first, or if the command is
        too large to be sent. Both get their number here."""
        work = next(_numbers)
        asked = Awaited(self, msgspec.structs.replace(lost, work=work))
        with self._lock:
            is_under_way = not self._ended
            if is_under_way:
                self._asked[work] = asked
        if isinstance(lost, m.Staged):
            self._new[work] = False
        if not is_under_way:
            asked.lose()
            return asked
        try:
            self.channel.send(msgspec.structs.replace(command, work=work))
        except FormatError as e:  # one miss: the thread that asks may be the scheduler's
            with self._lock:
                is_under_way = self._asked.pop(work, None) is not None
            if is_under_way:
                _limited.warning("too large", f"kvfetch: pages of a request count as missing: {e}")
                asked.lose(Reason.TOO_LARGE)
        return asked

    def write(
        self,
        command: m.Write,
        pool_pages: Sequence[int],
        read: ReadPages,
        quantising: Quantising | None,
        part: range,
        read_sides: Sequence[ReadSide],
        timeout_s: float,
    ) -> bool:
        """Queue pages for writing. Waits for room for them. Return whether they are queued. ``part``: which of those of
        ``quantising`` they are."""
        side_sizes = [self.setup.sides[pool] for pool, _ in command.sides]
        deadline_s = time.monotonic() + timeout_s
        with ExitStack() as undo:
            offsets: list[int] = []

            def allocate(num_bytes: int) -> int | None:
                offset = self._room.allocate(num_bytes, max(0.0, deadline_s - time.monotonic()))
                if offset is not None:
                    offsets.append(offset)
                    undo.callback(self._room.free, offset)
                return offset

            quantised = None
            if quantising is not None:
                quantised = self._quantise(command, quantising, part, sum(side_sizes), allocate)
                if quantised is None:  # as where all tokens are exact
                    undo.pop_all().close()
                    offsets.clear()
            if quantised is not None:
                command, value_bytes = quantised
            else:
                value_bytes = len(pool_pages) * self.setup.geometry.page_bytes
                offset = allocate(value_bytes + sum(side_sizes))
                if offset is None or not read(pool_pages, self._pages.whole, offset):
                    return False
            sides = self._pages.views(offsets[0] + value_bytes, torch.uint8, ((size,) for size in side_sizes))
            for read_side, into in zip(read_sides, sides, strict=True):
                content = read_side()
                if content is None:
                    return False
                into.copy_(content)
            undo.pop_all()
        command = msgspec.structs.replace(command, offset=offsets[0])
        self._count_queued(len(pool_pages))  # now: the answers may come before this thread goes on
        taken = self.ask(command, m.Taken(0, is_lost=True))
        for each in offsets:
            taken.add_done_callback(lambda _, each=each: self._room.free(each))  # type: ignore[misc]
        if taken.done() and taken.result().is_lost:
            self._count_queued(-len(pool_pages))
            return False
        return True

    def _quantise(
        self,
        command: m.Write,
        quantising: Quantising,
        part: range,
        side_bytes: int,
        allocate: Callable[[int], int | None],
    ) -> tuple[m.Write, int] | None:
        """Let pages be quantised into the shared memory, with room for side pages behind them. Return the command, and
        how many bytes they take without exact tokens; None if there is no room, or if the pages are to be read as
        values."""
        value_bytes = len(part) * self.setup.geometry.page_bytes
        num_bytes = quantising.token_bytes * len(part) * self.setup.geometry.page_size
        if num_bytes > value_bytes or (offset := allocate(num_bytes + side_bytes)) is None:
            return None
        exact = quantising.into(part, self._pages.whole, offset)
        if exact is None:
            return None
        sizes = [x.nbytes for x in exact]
        exact_offset = 0
        if exact_bytes := sum(sizes):  # which is rare
            room = allocate(exact_bytes) if num_bytes + exact_bytes <= value_bytes else None
            if room is None:
                return None
            exact_offset = room
            torch.cat(list(exact), out=self._pages.view(exact_offset, torch.uint8, (exact_bytes,)))
        cells = tuple(zip(quantising.num_rows, sizes, strict=True))
        return msgspec.structs.replace(command, cells=cells, exact=exact_offset), num_bytes

    def _count_queued(self, num_pages: int) -> None:
        with self._lock:
            self._num_queued += num_pages

    # Events

    def serve(self, closing: threading.Event) -> None:
        """Process events until the data plane ends or hangs."""
        silence = _Silence(self.running)
        while True:
            try:
                events = silence.broken_by(self._receive())
            except EndedError:
                return
            if silence.is_longer(*(_LEAVING_TICKS if self._ended else _RUNNING_TICKS)) and not closing.is_set():
                logger.warning("kvfetch: the data plane does not answer")
                return
            if not events:
                self.channel.send(m.Ping())
            self._take_in_all(events)

    def step(self, wait_s: float = 0.0) -> None:
        """Complete the stagings whose answers have come, a bounded number. Waits up to ``wait_s`` for those that were
        begun since the last step and lie in the data plane's memory, and less for the word that they do."""
        began_s, left_s = time.monotonic(), 0.0
        while self._asked:
            try:
                self._take_in_all(self.channel.receive_staged(left_s))
            except FormatError:
                logger.exception("kvfetch: the data plane sends invalid bytes")
                self.running.kill()
                break
            are_near = [is_near for work, is_near in self._new.items() if work in self._asked]
            left_s = began_s + (wait_s if any(are_near) else min(wait_s, _WORD_S)) - time.monotonic()
            if not are_near or left_s <= 0.0:
                break
        self._new.clear()

    def _receive(self) -> list[m.Event]:
        """Return new events. Raises EndedError if the data plane has ended."""
        events = self.channel.receive(_TICK_S)
        if events is None:
            raise EndedError("the data plane ended")
        return events

    def _take_in_all(self, events: Iterable[m.Event]) -> None:
        for event in events:
            try:
                self._take_in(event)
            except Exception:  # must not end the thread, on which others depend
                logger.exception("kvfetch: processing event %s failed", type(event).__name__)

    def _take_in(self, event: m.Event) -> None:
        """Handle an event of the data plane, on the thread that receives it."""
        match event:
            case m.Found() | m.Fetched() | m.Staged() | m.ClearOver() | m.Taken():
                self._answer(event)
            case m.Near():
                self._new[event.work] = True
            case m.ProfileFound():
                self.found_profile = event.digest
            case m.AuditsTold():
                self.audits = event.audits
            case m.Settled():
                self._count_queued(-event.num_pages)
                # Not before the store works again: until then, pages that come again would be lost again.
                if self.has_lost and not event.is_lost:
                    self.on_loss()
                self.has_lost = event.is_lost

    def _answer(self, event: m.Answer) -> None:
        """Complete the work that an event answers, unless that is done: the data plane may have ended, as another
        thread has noticed."""
        with self._lock:
            asked = self._asked.pop(event.work, None)
        if asked is not None:
            asked.set_result(event)  # not with the lock held: it calls back

    def leave(self) -> None:
        """Let the data plane write what is queued, and end. It takes no more work, and completes that under way soon.
        Never waits."""
        with self._lock:
            self._ended = True
        self._room.close()
        self.channel.send(m.Close())

    def _close_files(self) -> None:
        for each in (self.channel, self.values, self._pages):
            each.close()

    def staged_values(self, staged: m.Staged) -> StagedValues:
        return StagedValues.of(staged, self.values, self.setup.geometry, self.setup.sides)

    def side_pages(self, fetched: m.Fetched) -> dict[SideKey, torch.Tensor]:
        return side_views(fetched, self.values, self.setup.sides)

    def end(self) -> bool:
        """End the data plane, and complete all its work under way as misses. Return whether it has lost pages that it
        had taken for writing."""
        self.running.kill()
        self.running.join(CLOSE_S)
        self._room.close()
        with self._lock:
            self._ended = True
            lost, self._asked = self._asked, {}
        for each in lost.values():
            each.lose()
        self._close_files()
        if self._num_queued > 0:
            metrics.WRITTEN_PAGES.labels("dropped_data_plane").inc(self._num_queued)
            logger.warning("kvfetch: %d pages that were queued for writing are lost", self._num_queued)
        return self._num_queued > 0
