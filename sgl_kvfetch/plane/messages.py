"""The messages between the engine and its data plane. Sans-IO.

The engine sends commands, the data plane sends events. A message is its length in four bytes, followed by MessagePack.
Values and pages go through shared memory (`Arena`); messages contain only their offsets. The engine chooses the
``work`` numbers and never reuses one.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from sgl_kvfetch.errors import DECODE_ERRORS, FormatError
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.labels import Labels

VERSION = 8
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20  # limit for a message; a lookup has 32 bytes per page


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Watch(msgspec.Struct, frozen=True, array_like=True):
    """What a data plane needs to find a profile for its engine's weights, or to make one. ``weights``: their
    fingerprint. ``model_folder``: the checkpoint. ``model_name``: for people. ``finds``: whether to look for the newest
    profile and to calibrate if there is none, as rank 0 does; else only `TakeProfile` asks for one."""

    weights: str
    model_folder: str
    model_name: str
    tp_size: int
    finds: bool


# Commands


class Start(_Message, frozen=True):
    """The first command. ``config``: the parsed `KVFetchConfig`. ``first_head``, ``end_head``: the rank's heads.
    ``sides``: the bytes of a page in each side pool. ``watch``: what to find a profile for, if one is to be found.
    ``takes_code``: whether the engine restores staged cells itself, where `coded.gpu_restores`. ``gpu``: the number of
    the engine's GPU, whose video engines decode for a data plane in a process of its own, if they can."""

    config: dict[str, Any]
    namespace: Namespace
    first_head: int
    end_head: int
    rank: int
    most_span_pages: int | None
    sides: dict[str, int] = {}
    labels: Labels = Labels()
    watch: Watch | None = None
    takes_code: bool = False
    gpu: int | None = None
    version: int = VERSION


class LookUp(_Message, frozen=True):
    """Find the longest stored run of these pages. ``hashes``: 32 bytes per page.
    ``trailing``: side pools that the run needs, each with the number of its last pages that must be there; 0 for all.
    """

    work: int
    hashes: bytes
    trailing: dict[str, int] = {}


class FetchPages(_Message, frozen=True):
    """Fetch these pages, as far as they are stored: `Piece` brings their values, and `FetchOver` comes last.

    ``deadline_s``: in time.monotonic(). ``compute_s``: how long the engine would take to compute these pages; a fetch
    ends when it would compute the rest sooner.
    """

    work: int
    hashes: bytes
    deadline_s: float
    compute_s: float = math.inf


class Cancel(_Message, frozen=True):
    """End a fetch soon."""

    work: int


class ReadAhead(_Message, frozen=True):
    """Begin to read the pages that a lookup found: they will be fetched."""

    work: int


class Forget(_Message, frozen=True):
    """Forget the pages that a lookup found: they will not be fetched."""

    work: int


class Flush(_Message, frozen=True):
    """Drop all bytes that were read, because the engine's caches are emptied."""


class Stage(_Message, frozen=True):
    """Restore the longest stored run of these pages into shared memory, where the engine takes them: `Staged` answers.

    ``saved_s``: how much longer the engine would take without so many pages, for a few numbers of pages, ascending;
    empty if it has not been measured. ``request_id``, ``traceparent``: as of `timeline.Request`. ``is_idle``: whether
    the engine has nothing to compute now.
    """

    work: int
    hashes: bytes
    saved_s: tuple[tuple[int, float], ...] = ()
    request_id: str = ""
    traceparent: str = ""
    is_idle: bool = False


class Unstage(_Message, frozen=True):
    """Free the memory of a `Stage`, or end it soon. Nothing is written to that memory afterwards. ``is_sound``: false
    if the engine could not decode its cells; those segments are decoded here from now on."""

    work: int
    is_sound: bool = True


class FetchSide(_Message, frozen=True):
    """Fetch these pages from a side pool. ``deadline_s``: as in `FetchPages`."""

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


class FreePiece(_Message, frozen=True):
    """Free a piece's shared memory: the engine has taken its values."""

    offset: int


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


class TakeProfile(_Message, frozen=True):
    """Take a copy of this profile from the store; `ProfileTaken` answers."""

    digest: str


class Ping(_Message, frozen=True):
    """Answer with a ``Pong``."""


class Close(_Message, frozen=True):
    """Write what is queued, within a few seconds, and exit."""


# Events


class Ready(_Message, frozen=True):
    """The data plane serves commands from now on."""


class Refused(_Message, frozen=True):
    """The data plane cannot do what ``Start`` asks for, and exits. ``kind``: the name of the error's class."""

    kind: str
    reason: str


class Cost(msgspec.Struct, frozen=True, array_like=True):
    """The estimated duration of a fetch, from measurements. None: not measured yet, or too long ago."""

    transmit_s: float | None
    decode_s: float | None

    @property
    def seconds(self) -> float | None:
        """The duration of the slower stage, because the stages overlap."""
        return None if self.transmit_s is None else max(self.transmit_s, self.decode_s or 0.0)


class Found(_Message, frozen=True):
    """The result of a lookup: how many pages can be fetched, from the first on, and the cost of that.

    If side pools are needed: ``lengths`` has all the runs that could be used, in pages, and ``stored`` how long the
    longest run would be if each pool were the only one. The pool of KV is ``kv``. ``reason``: as in `Staged`.
    """

    work: int
    num_pages: int
    cost: Cost
    lengths: tuple[int, ...] = ()
    stored: dict[str, int] = {}
    reason: str = ""


class Staged(_Message, frozen=True):
    """The result of a `Stage`, which the scheduler reads in its steps.

    ``num_found`` pages are stored, of which the first ``num_pages`` are restored and verified. If there are any, there
    is a region for all of these pages at ``offset``: see `staging.region_views`. ``end``: the outcome, for the metrics.
    ``reason``: the first `reasons.Reason` why pages are missing; "" if they are merely not stored.
    If they are still coded, there is a table of ``num_cells`` `coded.CELL` at ``tables``, ``tables_bytes`` with what
    follows it.
    """

    work: int
    num_pages: int
    num_found: int
    offset: int
    end: str
    num_cells: int = 0
    tables: int = 0
    tables_bytes: int = 0
    reason: str = ""


class Piece(_Message, frozen=True):
    """Restored values of some pages, layers and heads: K at ``offset``, then V, ``(tokens, layers, heads, dim)`` each.
    ``pages``: counted from the first that was asked for."""

    work: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    pages: tuple[int, ...]
    offset: int


class SidePiece(_Message, frozen=True):
    """A side page at ``offset``. ``page``: counted from the first that was asked for."""

    work: int
    page: int
    num_bytes: int
    offset: int


class SideOver(_Message, frozen=True):
    """The last event of a ``FetchSide``. ``pages``: those that came, verified."""

    work: int
    pages: tuple[int, ...]


class FetchOver(_Message, frozen=True):
    """The last event of a ``FetchPages``: no more pieces come. The first ``num_pages`` pages are complete and
    verified. ``reason``: as in `Staged`."""

    work: int
    num_pages: int
    reason: str = ""


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


class ProfileTaken(_Message, frozen=True):
    """There is a profile for the engine's weights, and a copy of it on this machine. ``about``: one line for the
    log."""

    digest: str
    path: str
    about: str


class Pong(_Message, frozen=True):
    """Answers a ``Ping``."""


Command = (
    Start
    | LookUp
    | FetchPages
    | FetchSide
    | Cancel
    | ReadAhead
    | Forget
    | Stage
    | Unstage
    | Flush
    | Write
    | FreePiece
    | Clear
    | ShowPrompts
    | PauseCalibration
    | TakeProfile
    | Ping
    | Close
)
Event = (
    Ready
    | Refused
    | Found
    | Staged
    | Piece
    | FetchOver
    | SidePiece
    | SideOver
    | Taken
    | Settled
    | ClearOver
    | ProfileTaken
    | Pong
)

M = TypeVar("M")


def encode(message: Command | Event) -> bytes:
    """Return a message's bytes. Raises FormatError if they are more than the other end accepts: a command grows with
    the prompt that it is for."""
    body = msgspec.msgpack.encode(message)
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
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (size,) = _LENGTH.unpack_from(self._buffer, start)
                if size > _MOST_BYTES:
                    raise FormatError(f"a message of {size} bytes; at most {_MOST_BYTES} are allowed")
                end = start + _LENGTH.size + size
                if end > len(self._buffer):
                    return
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                try:
                    yield self._decoder.decode(body)
                except DECODE_ERRORS as e:
                    raise FormatError(f"a message that cannot be decoded: {e}") from e
        finally:
            del self._buffer[:start]
