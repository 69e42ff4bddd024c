"""Check the answers of an HTTP store: translate statuses and errors to StoreError, and limit the size of bodies."""

from __future__ import annotations

import io
import re
import ssl
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from sgl_kvfetch.errors import DECODE_ERRORS, FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.base import Lookup, ObjectInfo, SegmentHit
from sgl_kvfetch.stores.remote import listing_of

T = TypeVar("T", bound=msgspec.Struct)

_MAX_ERROR_BYTES = 4096
_BROKEN = (  # after connecting: ClientConnectorError is caught before
    aiohttp.ClientPayloadError,
    aiohttp.ServerConnectionError,
    OSError,
)
# Of OpenSSL: a self-signed certificate, one in the chain, and two for an issuer that is not known.
_UNKNOWN_CA = frozenset({18, 19, 20, 21})
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})
_RANGE_SENT = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/(?:[0-9]{1,18}|\*)")
_RANGE_REFUSED = re.compile(r"bytes \*/([0-9]{1,18})")


@contextmanager
def client_errors(what: str) -> Iterator[None]:
    """Translate aiohttp's errors to StoreError. ``what`` begins the message."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.SocketTimeoutError) as e:
        raise StoreError("timeout", f"{what}: no connection in time: {_text(e)}", retriable=True) from e
    except aiohttp.ClientProxyConnectionError as e:
        raise StoreError("refused", f"{what}: the environment's proxy: {_text(e)}", retriable=True) from e
    except aiohttp.ClientSSLError as e:
        raise _tls_error(what, e) from e
    except aiohttp.ClientConnectorError as e:
        raise StoreError("refused", f"{what}: {_text(e)}", retriable=True) from e
    except _BROKEN as e:
        raise StoreError("truncated", f"{what}: the connection broke: {_text(e)}", retriable=True) from e
    except (aiohttp.ClientError, HttpProcessingError, ValueError) as e:
        raise StoreError("protocol", f"{what}: {_text(e)}") from None  # a traceback would show the server's bytes


def _tls_error(what: str, error: aiohttp.ClientSSLError) -> StoreError:
    server, cause = f"{error.host}:{error.port}", error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in _UNKNOWN_CA:
            return StoreError(
                "tls",
                f"{what}: no CA that this machine knows has signed the certificate of {server} "
                f"({cause.verify_message}): name the file of its CA, as SSL_CERT_FILE in the environment, or as "
                "tls.ca_file in the config of SGLang's backend",
            )
        return StoreError("tls", f"{what}: the certificate of {server} does not hold: {cause.verify_message}")
    if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
        return StoreError("tls", f"{what}: {server} does not speak TLS: write its URL with http://")
    return StoreError("refused", f"{what}: {_text(error)}", retriable=True)


def _text(error: BaseException) -> str:
    return printable(str(error)[:500]) or type(error).__name__


async def require_status(response: aiohttp.ClientResponse, *expected: int) -> None:
    """Raise the matching StoreError unless the status is one of ``expected``."""
    if response.status in expected:
        return
    try:
        body = await _read_up_to(response, _MAX_ERROR_BYTES)
    except aiohttp.ClientError:
        body = b""
    has_token = "Authorization" in response.request_info.headers
    require_answer(response.method, str(response.url), response.status, body, expected, has_token)


def require_answer(method: str, url: str, status: int, body: bytes, expected: Collection[int], has_token: bool) -> None:
    """Raise the matching StoreError unless the status is one of ``expected``. ``has_token``: whether the request had
    one."""
    if status not in expected:
        problem = _token_problem(has_token) if status == 401 else ""
        raise status_error(status, f"{method} {url}: status {status}{problem}{_explanation(body)}")


def _token_problem(has_token: bool) -> str:
    return ", the store does not know this token" if has_token else ", the store wants a token and got none"


def status_error(status: int, message: str) -> StoreError:
    """Return the StoreError that an unexpected HTTP status means."""
    if status in (401, 403):
        return StoreError("unauthorised", message)
    if status == 413:
        return StoreError("too_large", message)
    if status == 507:
        return StoreError("full", message, retriable=True)
    if status in (400, 409, 416, 422, 501):
        return StoreError("invalid", message)
    if status >= 500 or status in (408, 429):
        return StoreError("server", message, retriable=True)
    return StoreError("protocol", message)


def _explanation(body: bytes) -> str:
    """Return the message of an error's body if a kvfetch server sent it, else an empty string."""
    try:
        said = msgspec.json.decode(body, type=wire.ErrorBody)
    except DECODE_ERRORS:
        return ""
    return f" ({printable(said.error[:100])}: {printable(said.message[:500])})"


async def read_whole(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Read the whole body. Raises ``too_large`` beyond ``most`` bytes, ``truncated`` if Content-Length is different."""
    announced = response.content_length
    if announced is not None and announced > most:
        raise StoreError("too_large", f"{response.url}: the body has {announced} bytes, the limit is {most}")
    body = await _read_up_to(response, most + 1)
    if len(body) > most:
        raise StoreError("too_large", f"{response.url}: the body exceeds the limit of {most} bytes")
    _require_length(response, len(body), announced)
    return body


async def read_range(response: aiohttp.ClientResponse, start: int, length: int | None, most: int) -> bytes:
    """Read the body of an answer to a ranged request. If the server ignored the range, cut it out of the whole object.

    Raises ``truncated`` if the object ends too early, ``too_large`` for more than ``most`` bytes.
    """
    if response.status == 200:
        return await _cut(response, start, length, most)
    num_bytes = await _require_range(response, start, length)
    if num_bytes == 0:
        return b""
    if num_bytes > most:
        raise StoreError("too_large", f"{response.url}: the range has {num_bytes} bytes, the limit is {most}")
    body = await _read_up_to(response, num_bytes + 1)
    _require_length(response, len(body), num_bytes)
    return body


async def take_range(response: aiohttp.ClientResponse, start: int, length: int, take: Callable[[bytes], None]) -> None:
    """Pass the body of a ranged answer to ``take`` as it arrives; in one piece if the server ignored the range."""
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
    """Check the headers of an answer to a ranged request. Return the body's size in bytes: ``length`` if given."""
    if response.status == 416:
        refused = _RANGE_REFUSED.fullmatch(response.headers.get("Content-Range", ""))
        if refused and length is None and int(refused[1]) == start:
            return 0
        raise StoreError("truncated", f"{response.url}: the object ends before byte {start}")
    await require_status(response, 206)
    sent = _RANGE_SENT.fullmatch(response.headers.get("Content-Range", ""))
    if sent is None or int(sent[1]) != start or int(sent[2]) < start:
        found = response.headers.get("Content-Range")
        raise StoreError("protocol", f"{response.url}: expected a Content-Range from byte {start} on, found {found!r}")
    num_bytes = int(sent[2]) + 1 - start
    if length is not None and num_bytes != length:
        raise StoreError("truncated", f"{response.url}: expected a range of {length} bytes, found {num_bytes}")
    _require_length(response, response.content_length, num_bytes)
    return num_bytes


async def _cut(response: aiohttp.ClientResponse, start: int, length: int | None, most: int) -> bytes:
    announced = response.content_length
    if announced is not None and start + (length or 0) > announced:
        wanted = "" if length is None else f"{length} bytes "
        raise StoreError("truncated", f"{response.url}: {announced} bytes; expected {wanted}from byte {start} on")
    to_skip = start
    while to_skip:
        piece = await response.content.read(min(to_skip, 1 << 20))
        if not piece:
            raise StoreError("truncated", f"{response.url}: the object ends before byte {start}")
        to_skip -= len(piece)
    if length is not None:
        body = await _read_up_to(response, length)
        _require_length(response, len(body), length)
        response.close()  # instead of reading the rest
        return body
    body = await _read_up_to(response, most + 1)
    if len(body) > most:
        raise StoreError("too_large", f"{response.url}: the limit is {most} bytes; found more from byte {start} on")
    _require_length(response, len(body), None if announced is None else announced - start)
    return body


async def _read_up_to(response: aiohttp.ClientResponse, most: int) -> bytes:
    body = io.BytesIO()  # its bytes are taken without a copy; to join pieces takes their size twice
    while most > 0:
        piece = await response.content.read(most)  # the bytes that have arrived; empty only at the end
        if not piece:
            break
        most -= body.write(piece)
    return body.getvalue()


def _require_length(response: aiohttp.ClientResponse, found: int | None, expected: int | None) -> None:
    if found is not None and expected is not None and found != expected:
        raise StoreError("truncated", f"{response.url}: expected {expected} bytes, found {found}", retriable=True)


def decode_hits(what: str, body: bytes, pages_asked: int) -> Lookup:
    """Decode the answer to a lookup. Raises StoreError (``protocol``)."""
    try:
        found = Lookup(msgspec.msgpack.decode(body, type=tuple[SegmentHit, ...]))
    except DECODE_ERRORS as e:
        raise StoreError("protocol", f"{what}: the answer is malformed: {_text(e)}") from e
    if found.num_pages > pages_asked:
        raise StoreError("protocol", f"{what}: the answer has more pages than requested: {found.num_pages}")
    return found


def decode_json(what: str, body: bytes, kind: type[T]) -> T:
    """Decode an answer in JSON. Raises StoreError (``protocol``)."""
    try:
        return msgspec.json.decode(body, type=kind)
    except DECODE_ERRORS as e:
        raise StoreError("protocol", f"{what}: the answer is malformed: {_text(e)}") from e


def decode_listed(line: bytes, prefix: str) -> ObjectInfo:
    """Decode one line of a listing. Raises StoreError (``protocol``)."""
    try:
        listed = msgspec.json.decode(line, type=ObjectInfo)
        parse_object_name(listed.name)
    except (*DECODE_ERRORS, FormatError) as e:
        raise StoreError("protocol", f"{listing_of(prefix)}: malformed line: {_text(e)}") from e
    if not listed.name.startswith(prefix):
        raise StoreError("protocol", f"{listing_of(prefix)}: {listed.name} does not have this prefix")
    return listed
