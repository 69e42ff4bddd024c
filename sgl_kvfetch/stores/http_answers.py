"""What an HTTP store answers, checked: statuses and errors to StoreError, bodies no larger than asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.base import Lookup, ObjectInfo, SegmentHit

_MAX_ERROR_BYTES = 4096
_BROKEN = (  # not at the start: ClientConnectorError is caught before
    aiohttp.ClientPayloadError,
    aiohttp.ServerConnectionError,
    aiohttp.UploadAbortedError,
    OSError,
)
_RANGE_SENT = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(?:\d{1,18}|\*)")
_RANGE_REFUSED = re.compile(r"bytes \*/(\d{1,18})")


@contextmanager
def client_errors(what: str) -> Iterator[None]:
    """Translate aiohttp's errors, once and at the edge."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.SocketTimeoutError) as e:
        raise StoreError("timeout", f"{what}: no connection in time: {e}", retriable=True) from e
    except aiohttp.ClientConnectorError as e:
        raise StoreError("refused", f"{what}: {e}", retriable=True) from e
    except _BROKEN as e:
        raise StoreError("truncated", f"{what}: the connection broke: {e or repr(e)}", retriable=True) from e
    except (aiohttp.ClientError, HttpProcessingError, ValueError) as e:
        raise StoreError("protocol", f"{what}: {e or repr(e)}") from e


async def require_status(response: aiohttp.ClientResponse, *expected: int) -> None:
    """Raises the StoreError that an unexpected status stands for."""
    if response.status in expected:
        return
    status = response.status
    message = f"{response.method} {response.url}: status {status}{await _explanation(response)}"
    if status in (401, 403):
        raise StoreError("unauthorised", message)
    if status == 413:
        raise StoreError("too_large", message)
    if status == 507:
        raise StoreError("full", message, retriable=True)
    if status >= 500 or status in (408, 429):
        raise StoreError("server", message, retriable=True)
    if status in (400, 409, 416, 422):
        raise StoreError("invalid", message)
    raise StoreError("protocol", message)


async def _explanation(response: aiohttp.ClientResponse) -> str:
    """What our own server says in an error's body; nothing for anybody else's."""
    try:
        said = msgspec.json.decode(await _read_up_to(response, _MAX_ERROR_BYTES), type=wire.ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError, aiohttp.ClientError):
        return ""
    return f" ({said.error}: {said.message[:500]})"


async def read_whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The whole body. Raises ``too_large`` beyond ``most`` bytes, ``truncated`` for another length than announced."""
    announced = response.content_length
    if announced is not None and announced > most:
        raise StoreError("too_large", f"{response.url}: {announced} bytes, more than {most}")
    body = await _read_up_to(response, most + 1)
    if len(body) > most:
        raise StoreError("too_large", f"{response.url}: more than {most} bytes")
    _require_length(response, len(body), announced)
    return body


async def read_range(response: aiohttp.ClientResponse, start: int, length: int | None, most: int) -> bytes:
    """The body of an answer to a ranged request; a server that ignored the range is read through, and cut.

    Raises ``truncated`` where the object ends too early, ``too_large`` for more than ``most`` bytes.
    """
    if length is not None and length > most:
        raise StoreError("too_large", f"{response.url}: asked for {length} bytes, more than {most}")
    if response.status == 200:
        return await _cut(response, start, length, most)
    num_bytes = await _require_range(response, start, length)
    if num_bytes == 0:
        return b""
    if num_bytes > most:
        raise StoreError("too_large", f"{response.url}: {num_bytes} bytes, more than {most}")
    body = await _read_up_to(response, num_bytes + 1)
    _require_length(response, len(body), num_bytes)
    return body


async def take_range(response: aiohttp.ClientResponse, start: int, length: int, take: Callable[[bytes], None]) -> None:
    """``read_range`` that hands the body over as it comes; all at once from a server that ignored the range."""
    if response.status == 200:
        take(await _cut(response, start, length, length))
        return
    left = await _require_range(response, start, length)
    while left:
        piece = await response.content.read(left)
        if not piece:
            _require_length(response, length - left, length)
        take(piece)
        left -= len(piece)


async def _require_range(response: aiohttp.ClientResponse, start: int, length: int | None) -> int:
    """How many bytes a ranged request is answered with, by the answer's headers: ``length`` if one is given."""
    if response.status == 416:
        refused = _RANGE_REFUSED.fullmatch(response.headers.get("Content-Range", ""))
        if refused and length is None and int(refused[1]) == start:
            return 0
        raise StoreError("truncated", f"{response.url}: the object ends before byte {start}")
    await require_status(response, 206)
    sent = _RANGE_SENT.fullmatch(response.headers.get("Content-Range", ""))
    if sent is None or int(sent[1]) != start or int(sent[2]) < start:
        found = response.headers.get("Content-Range")
        raise StoreError("protocol", f"{response.url}: asked for bytes from {start} on, answered {found!r}")
    num_bytes = int(sent[2]) + 1 - start
    if length is not None and num_bytes != length:
        raise StoreError("truncated", f"{response.url}: asked for {length} bytes, answered {num_bytes}")
    _require_length(response, response.content_length, num_bytes)
    return num_bytes


async def _cut(response: aiohttp.ClientResponse, start: int, length: int | None, most: int) -> bytes:
    announced = response.content_length
    if announced is not None and start + (length or 0) > announced:
        raise StoreError("truncated", f"{response.url}: {announced} bytes; asked for {length} from {start} on")
    to_skip = start
    while to_skip:
        piece = await response.content.read(min(to_skip, 1 << 20))
        if not piece:
            raise StoreError("truncated", f"{response.url}: the object ends before byte {start}")
        to_skip -= len(piece)
    if length is not None:
        body = await _read_up_to(response, length)
        _require_length(response, len(body), length)
        response.close()  # rather than read the rest
        return body
    body = await _read_up_to(response, most + 1)
    if len(body) > most:
        raise StoreError("too_large", f"{response.url}: more than {most} bytes from {start} on")
    _require_length(response, len(body), None if announced is None else announced - start)
    return body


async def _read_up_to(response: aiohttp.ClientResponse, most: int) -> bytes:
    pieces = []
    while most > 0:
        piece = await response.content.read(most)  # what is there, at least one byte before the end
        if not piece:
            break
        pieces.append(piece)
        most -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _require_length(response: aiohttp.ClientResponse, found: int | None, expected: int | None) -> None:
    if found is not None and expected is not None and found != expected:
        raise StoreError("truncated", f"{response.url}: {found} bytes, expected {expected}", retriable=True)


def decode_hits(what: str, body: bytes, pages_asked: int) -> Lookup:
    """A lookup's answer. Raises StoreError (``protocol``)."""
    try:
        rows = msgspec.msgpack.decode(body, type=tuple[wire.HitRow, ...])
    except msgspec.DecodeError as e:
        raise StoreError("protocol", f"{what}: the answer is malformed: {e}") from e
    found = sum(row.num_pages for row in rows)
    if found > pages_asked:
        raise StoreError("protocol", f"{what}: the answer has {found} pages")
    return Lookup(tuple(SegmentHit(row.manifest, row.first_page, row.num_pages) for row in rows))


def decode_deleted(what: str, body: bytes) -> wire.Deleted:
    """The answer to a deletion by prefix. Raises StoreError (``protocol``)."""
    try:
        return msgspec.json.decode(body, type=wire.Deleted)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise StoreError("protocol", f"{what}: the answer is malformed: {e}") from e


def decode_listed(line: bytes, prefix: str) -> ObjectInfo:
    """One line of a listing. Raises StoreError (``protocol``)."""
    try:
        listed = msgspec.json.decode(line, type=wire.ListedObject)
        parse_object_name(listed.name)
    except (msgspec.DecodeError, UnicodeDecodeError, FormatError) as e:
        raise StoreError("protocol", f"listing {prefix!r}: malformed line: {e}") from e
    if not listed.name.startswith(prefix):
        raise StoreError("protocol", f"listing {prefix!r}: got {listed.name}")
    return ObjectInfo(listed.name, listed.size_bytes, listed.modified_s)
