"""What the engine and its data plane say to each other. Sans-IO.

The engine sends commands, the data plane events. A message is its length in four bytes, and then MessagePack. Values
and pages do not go this way, but through shared memory (`Arena`): messages only say where in it they lie. Numbers that
name work are the engine's, and are not used again.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec

from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.keys import Namespace

VERSION = 1
_LENGTH = struct.Struct("<I")
_MOST_BYTES = 64 << 20  # of a message; a lookup has 32 bytes a page


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


# Commands


class Start(_Message, frozen=True):
    """The first one. ``config``: `KVFetchConfig`, as it was parsed. ``first_head``, ``end_head``: the rank's."""

    config: dict[str, Any]
    namespace: Namespace
    first_head: int
    end_head: int
    rank: int
    most_span_pages: int | None
    version: int = VERSION


class LookUp(_Message, frozen=True):
    """Find the longest stored run of these pages. ``hashes``: 32 bytes a page. ``reads_ahead``: begin to read it."""

    work: int
    hashes: bytes
    reads_ahead: bool = False


class Fetch(_Message, frozen=True):
    """Fetch what the lookup ``found`` told of, from its page ``first_page`` on; or if there was none, these pages.

    ``round_ends``: the pages, counted from the first that is fetched, where rounds end. ``deadline_s``: in
    time.monotonic(). ``request_id``: for the timeline.
    """

    work: int
    hashes: bytes
    round_ends: tuple[int, ...]
    deadline_s: float
    found: int | None = None
    first_page: int = 0
    request_id: str = ""


class Give(_Message, frozen=True):
    """The pages of a round have a destination: restore them."""

    work: int
    round: int


class Cancel(_Message, frozen=True):
    """End a lookup or a fetch soon. ``is_miss``: whether it counts as one."""

    work: int
    is_miss: bool = True


class Forget(_Message, frozen=True):
    """What this lookup found is not going to be fetched. A fetch takes it."""

    work: int


class Flush(_Message, frozen=True):
    """The engine's caches are emptied: keep no bytes of what was read."""


class Write(_Message, frozen=True):
    """Take pages out of shared memory and write them: K of all of them at ``offset``, then V."""

    work: int
    first_page: int  # position in the sequence
    previous_hash: bytes | None  # of the page before, None at the sequence's start
    hashes: bytes
    offset: int


class Free(_Message, frozen=True):
    """A piece has been taken out of shared memory."""

    offset: int


class Clear(_Message, frozen=True):
    """Delete all that the store has of this rank."""

    work: int


class Ping(_Message, frozen=True):
    """Say that you are there."""


class Close(_Message, frozen=True):
    """Write what is queued, within a few seconds, and exit."""


# Events


class Ready(_Message, frozen=True):
    """Commands are served."""


class Refused(_Message, frozen=True):
    """``Start`` asked for something that cannot be; the data plane exits. ``kind``: the error's class."""

    kind: str
    reason: str


class Found(_Message, frozen=True):
    """What a lookup has come to. ``transmit_s``, ``decode_s``: how long these pages will take, if that is known."""

    work: int
    num_pages: int
    transmit_s: float | None
    decode_s: float | None


class RoundHere(_Message, frozen=True):
    """A round's first bytes are here. Times as in ``Found``, of this round and those after it."""

    work: int
    round: int
    transmit_s: float | None
    decode_s: float | None


class Piece(_Message, frozen=True):
    """Some pages' values of some layers and heads, restored: K at ``offset``, then V, ``(tokens, layers, heads, dim)``
    each. ``pages``: counted from the round's first."""

    work: int
    round: int
    first_layer: int
    end_layer: int
    first_head: int
    end_head: int
    pages: tuple[int, ...]
    offset: int


class RoundOver(_Message, frozen=True):
    """No more pieces of this round come. ``num_pages``, from its first on, are whole and verified."""

    work: int
    round: int
    num_pages: int


class LinkHasRoom(_Message, frozen=True):
    """The link could serve another fetch beside this one."""

    work: int


class FetchOver(_Message, frozen=True):
    """The last event of a fetch."""

    work: int


class Taken(_Message, frozen=True):
    """Pages were taken out of shared memory. ``is_queued``: for writing; otherwise there was no room."""

    work: int
    is_queued: bool


class Cleared(_Message, frozen=True):
    """``fault``: why the store could not be cleared; empty if it was."""

    work: int
    fault: str


class Pong(_Message, frozen=True):
    """Answers a ``Ping``."""


Command = Start | LookUp | Fetch | Give | Cancel | Forget | Flush | Write | Free | Clear | Ping | Close
Event = Ready | Refused | Found | RoundHere | Piece | RoundOver | LinkHasRoom | FetchOver | Taken | Cleared | Pong

M = TypeVar("M")


def encode(message: Command | Event) -> bytes:
    body = msgspec.msgpack.encode(message)
    assert len(body) <= _MOST_BYTES, len(body)
    return _LENGTH.pack(len(body)) + body


class MessageReader(Generic[M]):
    """Messages out of the bytes that came, however these were cut."""

    def __init__(self, kind: Any) -> None:
        """``kind``: `Command` or `Event`."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that are whole now. Raises FormatError for anything else than such messages."""
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
                except msgspec.MsgspecError as e:
                    raise FormatError(f"a message that is not understood: {e}") from e
        finally:
            del self._buffer[:start]
