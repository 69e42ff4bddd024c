"""The protocol between the engine and its data plane: its messages, and the sockets that carry them.

The engine (`engine/process.py`) sends commands, the data plane (`plane/service.py`) sends events. A message is its
length in four bytes, followed by MessagePack. Values and pages go through shared memory (`Arena`); messages contain
only their offsets. The engine chooses the ``work`` numbers and never reuses one. Sending never waits, and whatever
bytes come raise nothing but FormatError.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast, get_args

import msgspec

from sgl_kvfetch import errors
from sgl_kvfetch.errors import DECODE_ERRORS, FormatError, KVFetchError, StoreError, StoreErrorReason
from sgl_kvfetch.keys import Labels, Namespace, valid_unicode
from sgl_kvfetch.status import Audits
from sgl_kvfetch.types import KVGeometry

VERSION = 14
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20  # limit for a message; a `Stage` has 32 bytes per page


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class ProfileNeeds(msgspec.Struct, frozen=True, array_like=True):
    """What a profile must have for a rank to serve by it. ``geometry``: of the rank's pool of K and V. ``layers``: the
    model's layers in that pool. ``first_layer``: the number of the first one among those of all pipeline stages.
    ``target_kl``: as in the config."""

    geometry: KVGeometry
    layers: tuple[int, ...]
    first_layer: int
    tp_rank: int
    tp_size: int
    target_kl: float | None = None


class TakenProfile(msgspec.Struct, frozen=True, array_like=True):
    """A profile that was taken from the store. ``path``: of this machine's copy. ``about``: one line for the log."""

    path: str
    digest: str
    about: str


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """What a data plane needs to find a profile for its engine's weights, or to make one. ``weights``: their
    fingerprint. ``model_folder``: the checkpoint. ``model_name``: for people. ``needs``: what a profile must have."""

    weights: str
    model_folder: str
    model_name: str
    needs: ProfileNeeds


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a tensor lies in the memory files of a pool. ``file``: which one. ``offset``, ``strides``: in values."""

    file: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class CodedCells(msgspec.Struct, frozen=True, array_like=True):
    """Where the cells of a staged prompt are that are still coded: ``num_cells`` rows of `coded.CELL` are at ``offset``
    of shared memory, and what the rows point to follows them. ``num_bytes``: of all that."""

    offset: int
    num_bytes: int
    num_cells: int


class SidePages(msgspec.Struct, frozen=True, array_like=True):
    """Where staged side pages are: one after another from ``offset`` of shared memory on. ``keys``: which they are, as
    in `Write`."""

    offset: int
    keys: tuple[tuple[str, int], ...]


# Commands


class TakeProfile(_Message, frozen=True):
    """Before `Start`: take the newest profile from the store that has what ``watch`` needs, or the one with ``digest``.
    `ProfileTaken` answers, or `Refused`. ``config``: as in `Start`."""

    config: dict[str, Any]
    watch: Watch
    digest: str | None = None


class Start(_Message, frozen=True):
    """Serve from now on."""

    config: dict[str, Any]  # the parsed `KVFetchConfig`
    namespace: Namespace
    first_head: int  # of the rank
    end_head: int
    rank: int
    most_span_pages: int | None
    sides: dict[str, int] = {}  # bytes per page of each side pool
    labels: Labels = Labels()
    watch: Watch | None = None  # what to find a profile for, if one is to be found
    takes_code: bool = False  # whether the engine restores staged cells itself, where `coded.gpu_restores`
    gpu: int | None = None  # the number of the engine's GPU, whose video engines decode for the data plane if they can
    # Where K and V lie in the pool to which pages are fetched, (pages, page_size, layers, heads, dim) each; empty in
    # device mode.
    pool: tuple[Place, ...] = ()
    version: int = VERSION


class Stage(_Message, frozen=True):
    """Restore the longest stored run of these pages into shared memory, where the engine takes it, unless the engine
    would compute it sooner: `Staged` answers, in device mode."""

    work: int
    hashes: bytes  # 32 per page
    # How much longer the engine would take without so many pages, for a few numbers of pages, ascending; empty if it
    # has not been measured.
    saved_s: tuple[tuple[int, float], ...] = ()
    request_id: str = ""  # as of `timeline.Request`, as is `traceparent`
    traceparent: str = ""
    is_idle: bool = False  # whether the engine has had nothing to compute since it last asked
    # Side pools that the run needs, each with the number of its last pages that must be there, 0 for all. These pages
    # are staged, too.
    trailing: dict[str, int] = {}


class LookUp(Stage, frozen=True):
    """Read the bytes of such a run ahead: `Found` answers before they have come. In host mode, SGLang says only later
    where the values go, and they are ten times as large as what is stored of them: `FetchPages` restores them, and
    `FetchSide` brings side pages."""


def is_for_its_end(trailing: Mapping[str, int]) -> bool:
    """Return whether a run that needs these side pages, as in `Stage`, is of use at its end alone. Otherwise a shorter
    run has all that it needs, too."""
    return any(trailing.values())


class FetchPages(_Message, frozen=True):
    """Restore these pages, as far as they are stored, to ``places`` in the engine's pool, as `Start` has described it:
    `Fetched` answers. Before that, any of these places may be written to."""

    work: int
    hashes: bytes
    places: tuple[int, ...]
    deadline_s: float  # in time.monotonic()
    is_first: bool = False  # whether the engine takes no pages of its `LookUp` before these
    is_last: bool = False  # nor any after them
    # Whether some of them are of use without the others: the fetch ends when the engine would compute the rest sooner.
    is_divisible: bool = True
    is_idle: bool = False  # as in `Stage`


class Unstage(_Message, frozen=True):
    """End a `Stage` or a fetch soon, or free what was staged. Nothing is written to that memory afterwards.
    ``is_sound``: false if the engine could not decode its cells; those segments are decoded here from now on.
    ``takes_code``: false if all are, as in `Start`."""

    work: int
    is_sound: bool = True
    takes_code: bool = True


class Flush(_Message, frozen=True):
    """Drop all bytes that were read, because the engine's caches are emptied."""


class FetchSide(_Message, frozen=True):
    """Bring these pages of a side pool into shared memory: `Fetched` answers. ``deadline_s``: as in `FetchPages`."""

    work: int
    pool: str
    hashes: bytes
    deadline_s: float


class Write(_Message, frozen=True):
    """Write pages that stay in shared memory until `Taken`: K of all pages at ``offset``, then V, then side pages in
    the order of ``sides``: the name of the pool, and the page, counted from the first. ``cells``: the integers of a
    token and the bytes of exact tokens, of each cell in storage order, if the exponents of all cells lie there instead
    of K and V, and then each cell's integers, a row each. Their exact tokens lie at ``exact``."""

    work: int
    first_page: int  # position in the sequence
    previous_hash: bytes | None  # hash of the page before, None at the sequence's start
    hashes: bytes
    offset: int
    sides: tuple[tuple[str, int], ...] = ()
    cells: tuple[tuple[int, int], ...] = ()
    exact: int = 0


class Clear(_Message, frozen=True):
    """Delete all segments of this rank from the store."""

    work: int


class ShowPrompts(_Message, frozen=True):
    """Calibrate on these prompts, unless the store has a profile before. ``windows``: for each window of text the
    pieces of prompts that make it, int32 token ids."""

    windows: tuple[tuple[bytes, ...], ...]


class PauseCalibration(_Message, frozen=True):
    """Stop calibrating, or go on with it: the engine needs the CPU, or does not."""

    is_paused: bool


class Ping(_Message, frozen=True):
    """Answer with a ``Pong``."""


class Close(_Message, frozen=True):
    """Write what is queued, within a few seconds, and exit."""


# Events


class Ready(_Message, frozen=True):
    """The data plane serves commands from now on."""


class ProfileTaken(_Message, frozen=True):
    """The answer to `TakeProfile`. ``taken`` is None if the store has no such profile."""

    taken: TakenProfile | None


class Refused(_Message, frozen=True):
    """The data plane cannot do what `TakeProfile` or `Start` asks for; after `Start`, it exits. ``kind``: the name of
    the error's class, or the reason of a StoreError."""

    kind: str
    reason: str

    @classmethod
    def of(cls, error: KVFetchError) -> Refused:
        kind = error.reason if isinstance(error, StoreError) else type(error).__name__
        return cls(kind, valid_unicode(str(error)))

    @property
    def error(self) -> KVFetchError:
        if self.kind in get_args(StoreErrorReason):
            return StoreError(cast("StoreErrorReason", self.kind), self.reason)
        kind: type[KVFetchError] = getattr(errors, self.kind, KVFetchError)
        return kind(self.reason)


class Found(_Message, frozen=True):
    """The result of a `LookUp`. The pool of KV is ``kv`` in ``stored``."""

    work: int
    num_pages: int = 0  # the first of the stored pages, which are read ahead
    num_found: int = 0  # stored pages
    reason: str = ""  # the first `reasons.Reason` why pages are missing; "" if they are merely not stored
    lengths: tuple[int, ...] = ()  # if side pools are needed, all the runs that could be used, in pages
    stored: dict[str, int] = {}  # if side pools are needed: the longest run if that pool were the only one


class Fetched(_Message, frozen=True):
    """The result of a `FetchPages`: the first ``num_pages`` are restored and verified. Or that of a `FetchSide`: any
    ``num_pages`` are, and lie where ``sides`` says, in shared memory, until `Unstage`. ``reason``: as in `Found`."""

    work: int
    num_pages: int = 0
    reason: str = ""
    sides: SidePages | None = None


class Near(_Message, frozen=True):
    """The pages of a `Stage` lie ready in the data plane's memory: `Staged` follows within milliseconds."""

    work: int


class Staged(_Message, frozen=True):
    """The result of a `Stage`. What is in shared memory lies there until `Unstage`."""

    work: int
    num_pages: int = 0  # the first of the stored pages, which are restored and verified
    num_found: int = 0  # stored pages
    reason: str = ""  # as in `Found`
    offset: int = 0  # of a region for all stored pages: see `staging.region_views`
    code: CodedCells | None = None  # where the pages' cells are, if they are still coded
    sides: SidePages | None = None  # the side pages that they need


class Taken(_Message, frozen=True):
    """Nothing reads the shared memory of a `Write` any longer: its pages are encoded, or dropped. ``is_lost``: the
    command has not reached a data plane."""

    work: int
    is_lost: bool = False


class Settled(_Message, frozen=True):
    """So many pages have left the queue: they were written or dropped. ``is_lost``: the store failed, so that they may
    be written when they come again."""

    num_pages: int
    is_lost: bool = False


class ClearOver(_Message, frozen=True):
    """The result of a ``Clear``. ``fault``: why the store could not be cleared; empty if it was."""

    work: int
    fault: str


class ProfileFound(_Message, frozen=True):
    """The store has a profile for the engine's weights."""

    digest: str


class AuditsTold(_Message, frozen=True):
    """What audits have found until now."""

    audits: Audits


class Pong(_Message, frozen=True):
    """Answers a ``Ping``."""


Command = (
    TakeProfile
    | Start
    | Stage
    | LookUp
    | FetchPages
    | FetchSide
    | Unstage
    | Flush
    | Write
    | Clear
    | ShowPrompts
    | PauseCalibration
    | Ping
    | Close
)
Answer = Found | Fetched | Staged | Taken | ClearOver
Event = ProfileTaken | Ready | Refused | Answer | Near | Settled | ProfileFound | AuditsTold | Pong

M = TypeVar("M")


def encode(message: Command | Event) -> bytes:
    """Return a message's bytes. Raises FormatError if they are more than the other end accepts: a command grows with
    the prompt that it is for. So it does for text that is no Unicode, such as the name of a folder in another encoding.
    """
    try:
        body = msgspec.msgpack.encode(message)
    except UnicodeEncodeError as e:
        found = ascii(e.object[max(0, e.start - 40) : e.end + 40])
        raise FormatError(f"a {type(message).__name__} with the text {found}: expected valid Unicode") from e
    if len(body) > _MOST_BYTES:
        raise FormatError(f"a {type(message).__name__} of {len(body)} bytes; messages have at most {_MOST_BYTES}")
    return _LENGTH.pack(len(body)) + body


class MessageReader(Generic[M]):
    """Decodes messages from received bytes, wherever these were split."""

    def __init__(self, kind: Any) -> None:
        """``kind``: `Command` or `Event`."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Add ``data`` and yield all complete messages. Raises FormatError for bytes that are not such messages."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > _MOST_BYTES:
                raise FormatError(f"a message of {size} bytes; at most {_MOST_BYTES} are allowed")
            end = _LENGTH.size + size
            if end > len(self._buffer):
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield self._decoder.decode(body)
            except DECODE_ERRORS as e:
                raise FormatError(f"a message that cannot be decoded: {e}") from e


_READ_BYTES = 1 << 18


class Outbox:
    """Sends messages from any thread: bytes that the socket does not take at once are sent by ``flush``."""

    def __init__(self, sock: socket.socket, on_unsent: Callable[[], object]) -> None:
        """``on_unsent`` is called when bytes are left: call ``flush`` whenever the socket takes bytes, until it returns
        True."""
        sock.setblocking(False)
        self.sock = sock
        self._on_unsent = on_unsent
        self._unsent: deque[memoryview] = deque()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Command | Event) -> None:
        """Send a message. Does nothing once closed. Raises FormatError as `encode` does."""
        data = memoryview(encode(message))
        with self._lock:
            if self._closed:
                return
            self._unsent.append(data)
            if len(self._unsent) == 1 and not self.flush():
                self._on_unsent()

    def flush(self) -> bool:
        """Send what is left. Return whether nothing is."""
        with self._lock:
            try:
                while self._unsent:
                    data = self._unsent[0]
                    sent = self.sock.send(data)
                    if sent == len(data):
                        self._unsent.popleft()
                    else:
                        self._unsent[0] = data[sent:]
            except BlockingIOError:
                return False
            except OSError:
                self._unsent.clear()  # the reader of this socket will notice it
            return True

    def receive(self) -> bytes:
        """Return bytes that the socket has received. Raises OSError if there are none, or once closed."""
        with self._lock:
            return self.sock.recv(_READ_BYTES)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._unsent.clear()
            self.sock.close()


class Channel:
    """The engine's end. Commands are sent from any thread, and one thread receives events. What the scheduler looks for
    in its steps has a socket of its own, so that no other thread has to wake up for it."""

    def __init__(self, commands: socket.socket, staged: socket.socket) -> None:
        """``commands`` brings all events but those that ``staged`` brings: `Near` and `Staged`, in device mode."""
        self._waker = os.eventfd(0, os.EFD_NONBLOCK)
        self._outbox = Outbox(commands, lambda: os.eventfd_write(self._waker, 1))
        self._events: MessageReader[Event] = MessageReader(Event)
        self._staged = Outbox(staged, lambda: None)  # which sends nothing
        self._answers: MessageReader[Near | Staged] = MessageReader(Near | Staged)
        self._poller = select.poll()
        self._poller.register(self._waker, select.POLLIN)
        self._poller.register(commands)
        self._staged_poller = select.poll()
        self._staged_poller.register(staged, select.POLLIN)
        self.send = self._outbox.send

    def receive(self, timeout_s: float) -> list[Event] | None:
        """Wait for events. Return an empty list only if the other end neither sends nor takes a byte for ``timeout_s``,
        and None if it is gone or sends invalid bytes."""
        sock = self._outbox.sock
        while True:
            self._poller.modify(sock, select.POLLIN | (select.POLLOUT if self._outbox.has_unsent else 0))
            ready = dict(self._poller.poll(timeout_s * 1e3))
            if not ready:
                return []
            if self._waker in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._waker)
            self._outbox.flush()
            if ready.get(sock.fileno(), 0) & ~select.POLLOUT:
                try:
                    data = sock.recv(_READ_BYTES)
                    events = list(self._events.feed(data)) if data else None
                except BlockingIOError:
                    continue
                except (OSError, FormatError):
                    return None
                if events is None or events:
                    return events

    def receive_staged(self, timeout_s: float = 0.0) -> list[Near | Staged]:
        """Return answers that have come, at most as many as one read returns, or wait up to ``timeout_s`` for one. One
        thread may call this. Raises FormatError."""
        if timeout_s:
            self._staged_poller.poll(timeout_s * 1e3)
        try:
            return list(self._answers.feed(self._staged.receive()))
        except OSError:  # none has come, or the other end is gone, as the other thread notices
            return []

    def close(self) -> None:
        """Close the sockets. Call this on the thread that receives."""
        self._outbox.close()
        self._staged.close()
        os.close(self._waker)
