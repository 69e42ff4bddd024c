"""Client of a store behind HTTP: ``kvfetch serve``, or any server that offers the same paths.

Its answers are checked: statuses and errors become StoreError, and bodies have a limit.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from sgl_kvfetch.codec import Content, views_of
from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, parse_object_name
from sgl_kvfetch.log import printable
from sgl_kvfetch.status import Audits
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.base import (
    Lookup,
    ObjectInfo,
    SegmentHit,
    bytes_read,
    fill_pieces,
    left_of,
    object_digest,
    require_name,
    require_namespace,
)
from sgl_kvfetch.stores.notes import NoteKind
from sgl_kvfetch.stores.remote import (
    HttpOptions,
    RemoteStore,
    StallWatch,
    TlsFiles,
    Token,
    environment_proxy,
    listing_of,
)
from sgl_kvfetch.stores.transfers import LEAST_SENT_BYTES, Transfers, require_range
from sgl_kvfetch.tls import FreshContext, refusal, tls_error
from sgl_kvfetch.user_files import FreshFiles

Body = TypeVar("Body", bound=msgspec.Struct)

_MAX_ERROR_BYTES = 4096
_BROKEN = (  # after connecting: ClientConnectorError is caught before
    aiohttp.ClientPayloadError,
    aiohttp.ServerConnectionError,
    OSError,
)


@contextmanager
def client_errors(what: str) -> Iterator[None]:
    """Translate aiohttp's errors to StoreError. ``what`` begins the message. A ConfigError says enough by itself."""
    try:
        yield
    except ConfigError:
        raise
    except (aiohttp.ConnectionTimeoutError, aiohttp.SocketTimeoutError) as e:
        raise StoreError("timeout", f"{what}: no connection in time: {_text(e)}", retriable=True) from e
    except aiohttp.ClientProxyConnectionError as e:
        raise StoreError("refused", f"{what}: the environment's proxy: {_text(e)}", retriable=True) from e
    except aiohttp.ClientSSLError as e:
        raise tls_error(what, f"{e.host}:{e.port}", e.os_error) from e
    except aiohttp.ClientConnectorError as e:
        cause = e.os_error
        number = cause.errno or 0  # negative for names that do not resolve
        said = os.strerror(number) if number > 0 else cause.strerror or _text(cause)
        raise StoreError("refused", f"{what}: no connection to {e.host}:{e.port}: {said}", retriable=True) from e
    except _BROKEN as e:
        if (against := refusal(e)) is not None:
            raise StoreError("tls", f"{what}: the server refuses the TLS handshake: {against}") from e
        raise StoreError("truncated", f"{what}: the connection broke: {_text(e)}", retriable=True) from e
    except (aiohttp.ClientError, HttpProcessingError, ValueError) as e:
        raise StoreError("protocol", f"{what}: {_text(e)}") from None  # a traceback would show the server's bytes


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
        said = _explanation(body)
        problem = _of_proxy(status) if not said and method != "HEAD" else ""  # whose answers have no body
        problem = problem or _problem(status, said, has_token)
        error = status_error(status, f"{method} {url}: status {status}{problem}{said}")
        if status == 507 and said.startswith(" (io: "):
            error.reason = "io"  # the disk refuses what is written, although it has room
        raise error


def _of_proxy(status: int) -> str:
    """Return what a status means that no kvfetch server has said, if that is known."""
    if status in (401, 403):
        return ", not by kvfetch: something in front of the store, such as a proxy, wants other credentials"
    if status == 413:
        return ": a proxy in front of the store takes no body of this size: raise its limit (client_max_body_size)"
    if status == 502:
        return ": a proxy in front of the store does not reach it: is the store running, and where the proxy looks?"
    if status == 504:
        return (
            ": a proxy in front of the store has ended the request: the store is slow or gone, or the proxy's time for "
            "a request is too short for so many bytes (proxy_read_timeout, or the route's timeout)"
        )
    return ", not by kvfetch: look at the proxy in front of the store, too" if status in (500, 503) else ""


def _problem(status: int, said: str, has_token: bool) -> str:
    """Return what an unexpected status means, where that is known. ``said``: by a kvfetch server."""
    if status == 401:
        return ", the store does not know this token" if has_token else ", the store wants a token and got none"
    if status == 404 or (status in (405, 501) and not said):
        return ": no kvfetch store has this address; a store's URL is the one that kvfetch serve has printed"
    return ""


def status_error(status: int, message: str) -> StoreError:
    """Return the StoreError that an unexpected HTTP status means."""
    if status in (401, 403):
        return StoreError("unauthorised", message)
    if status == 413:
        return StoreError("too_large", message)
    if status == 507:
        return StoreError("full", message, retriable=True)
    if status == 416:  # the object ends before the range
        return StoreError("truncated", message)
    if status in (400, 409, 422, 501):
        return StoreError("invalid", message)
    if status in (502, 504):
        return StoreError("proxy", message, retriable=True)
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


async def read_whole(response: aiohttp.ClientResponse, most: int, heard: Callable[[], None] = lambda: None) -> bytes:
    """Read the whole body. ``heard``: called for each piece. Raises ``too_large`` beyond ``most`` bytes, ``truncated``
    if Content-Length is different."""
    announced = response.content_length
    if announced is not None and announced > most:
        raise StoreError("too_large", f"{response.url}: the body has {announced} bytes, the limit is {most}")
    body = await _read_up_to(response, most + 1, heard)
    if len(body) > most:
        raise StoreError("too_large", f"{response.url}: the body exceeds the limit of {most} bytes")
    _require_length(response, len(body), announced)
    return body


async def take_range(
    response: aiohttp.ClientResponse, start: int, length: int, take: Callable[[bytes], object]
) -> None:
    """Pass the body of a ranged answer to ``take`` as it arrives. Raises StoreError, ``truncated`` if the object ends
    too early."""
    await require_status(response, 206)
    require_range(str(response.url), response.headers.get("Content-Range"), response.content_length, start, length)
    left = length
    while left:
        piece = await response.content.read(left)
        if not piece:
            _require_length(response, length - left, length)
        take(piece)
        left -= len(piece)


async def _read_up_to(response: aiohttp.ClientResponse, most: int, heard: Callable[[], None] = lambda: None) -> bytes:
    body = io.BytesIO()  # its bytes are taken without a copy; to join pieces takes their size twice
    while most > 0:
        piece = await response.content.read(most)  # the bytes that have arrived; empty only at the end
        if not piece:
            break
        most -= body.write(piece)
        heard()
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


def decode_json(what: str, body: bytes, kind: type[Body]) -> Body:
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


T = TypeVar("T")

# Reasons for which a retry makes sense at once. A full store, for example, stays full.
RETRIED = frozenset({"refused", "server", "proxy", "truncated", "timeout"})
# A body that was cut for one of these is sent once more, and not again: a proxy's limit cuts it each time.
_CUTS = frozenset({"proxy", "truncated"})
_MOST_SENT = 2
_SEND_PIECE_BYTES = 1 << 20
_MAX_IDLE_TURNS = 16  # of a deletion by prefix, in a row
_MAX_REPLACES = 4
_ENDLESS = StallWatch(None, lambda error: None)


class HttpStore(RemoteStore):
    """One pool of connections. The first call creates it, on the event loop of that call.

    Every request is idempotent, so attempts that failed in the network or on the server are retried until the
    deadline. Answers are not trusted: one that is too large or malformed raises StoreError.
    """

    def __init__(self, url: str, *, token: Token | None = None, options: HttpOptions | None = None) -> None:
        """Check the arguments: ``url`` is http(s)://host[:port][/path], and ``token`` printable ASCII.

        Raises ConfigError for others, and if a file of ``options.tls`` cannot be used.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"store URL {url!r} is not http(s)://host[:port][/path]")
        if parts.username or parts.password:
            raise ConfigError("a store URL must not contain a user or a password; use a token")
        self._token_file = token if isinstance(token, FreshFiles) else None
        if isinstance(token, FreshFiles):
            token = token.value
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise ConfigError("the token is not allowed: expected printable ASCII without spaces around it")
        super().__init__(url, options)
        proxy = environment_proxy(parts.scheme)
        self._proxy = proxy.url if proxy and proxy.leads_to(parts.hostname) else None
        self._tls = (self.options.tls or TlsFiles()).context() if parts.scheme == "https" else True
        self._headers = {"Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        self._moves: Transfers | None = None

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Read an object. Raises ``too_large``, too, for more than ``max_object_bytes``, or than a manifest may have.

        Without ``length``, the size is not known in advance, so the deadline is ``timeout_s``.
        """
        assert not start or length is not None, "a range has a length"
        if length is not None:
            return await bytes_read(self, name, start, length)
        return await self._get(f"getting {name}", self._object_url(name), self._size_limit(name))

    async def _get(self, what: str, url: str, most: int) -> bytes | None:
        """Read all of what has up to ``most`` bytes."""

        async def ask(heard: Callable[[], None]) -> bytes | None:
            async with self._request("GET", url) as response:
                if response.status == 404:
                    return None
                await require_status(response, 200)
                return await read_whole(response, most, heard)

        return await self._retried(what, lambda: self._lookups.answer(what, ask))

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Read a range. A retry continues where the attempt before it ended."""
        self._size_limit(name, length := sum(map(len, into)))
        if not length:
            return await self._get_nothing(name, start) is not None
        return await self._read(f"reading {name}", self._object_url(name), start, length, into, received)

    async def _read(
        self,
        what: str,
        url: str,
        start: int,
        length: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Fill ``into`` with the bytes of ``url`` from byte ``start`` on. Return False if there is nothing there."""
        position = start

        async def ask(heard: Callable[[], None]) -> bool:
            """Ask for what has not come yet."""

            def took(num_bytes: int) -> None:
                nonlocal position
                position += num_bytes
                heard()
                self.options.on_received(num_bytes)
                received(num_bytes)

            def take(piece: bytes) -> None:
                fill_pieces(left_of(into, position - start), piece)
                took(len(piece))

            left = left_of(into, position - start)
            if not left:  # it was given up at the very end
                return True
            transfers = self._transfers()
            if transfers is not None:
                answer = await transfers.receive(url, position, left, took)
                require_answer("GET", url, *answer, (206, 404), "Authorization" in self._headers)
                return answer.status == 206
            headers = {"Range": f"bytes={position}-{start + length - 1}"}
            async with self._request("GET", url, headers=headers) as response:
                if response.status == 404:
                    return False
                await take_range(response, position, start + length - position, take)
                return True

        async def attempt() -> bool:
            async with self._free_reads:
                return await self._reads.answer(what, ask)

        return await self._retried(what, attempt, length)

    def _transfers(self) -> Transfers | None:
        """Return what moves bytes from and to where they lie; None behind a proxy, which aiohttp knows how to ask."""
        self._require_open()
        if self._moves is None and self._proxy is None:
            options = self.options
            self._moves = Transfers(
                self.url, self._headers, self._tls, options.connect_timeout_s, options.max_connections
            )
        return self._moves

    async def put(self, name: str, data: Content) -> None:
        """Store an object. If the server demands it, replace a stored manifest by its digest."""
        if await self._put(f"putting {name}", name, data, {}):
            return
        for _ in range(_MAX_REPLACES):
            current = await self.get(name)
            tag = {"If-None-Match": "*"} if current is None else {"If-Match": wire.entity_tag(object_digest(current))}
            if current == data or await self._put(f"replacing {name}", name, data, tag):
                return
        raise StoreError("server", f"putting {name}: others replaced it {_MAX_REPLACES} times", retriable=True)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Replace a manifest with ``If-Match``, which the server must support. Raises as ``put`` does."""
        if not require_name(name).is_manifest:
            raise StoreError("invalid", f"{name} is not a manifest; data objects are never replaced")
        tag = {"If-Match": wire.entity_tag(expected_digest)}
        # An earlier attempt may have replaced it and lost only its answer.
        return await self._put(f"replacing {name}", name, data, tag) or await self.get(name) == data

    async def _put(self, what: str, name: str, data: Content, condition: Mapping[str, str]) -> bool:
        """Return False if the server says that the condition does not hold."""
        is_manifest = require_name(name).is_manifest
        expected = (200, 201, 204, *((412,) if is_manifest else ()))
        headers, url, views = {"Content-Type": wire.BYTES_TYPE, **condition}, self._object_url(name), views_of(data)

        async def attempt() -> int:
            transfers = self._transfers() if len(data) >= LEAST_SENT_BYTES else None
            if transfers is not None:
                answer = await transfers.send(url, headers, views)
                require_answer("PUT", url, *answer, expected, "Authorization" in self._headers)
                return answer.status
            async with self._request("PUT", url, headers=headers, body=views) as response:
                await require_status(response, *expected)
                return response.status

        return await self._retried(what, attempt, len(data), _MOST_SENT) != 412

    async def head(self, name: str) -> ObjectInfo | None:
        """Return size and time. The time is in whole seconds; it is 0 if the server sends none."""
        require_name(name)

        async def attempt() -> ObjectInfo | None:
            async with self._request("HEAD", self._object_url(name)) as response:
                if response.status == 404:
                    return None
                await require_status(response, 200)
                if response.content_length is None:
                    raise StoreError("protocol", f"{name}: the answer to HEAD has no Content-Length")
                modified_s = _http_date_s(response.headers.get("Last-Modified"))
                return ObjectInfo(name, response.content_length, modified_s)

        return await self._retried(f"looking at {name}", attempt)

    async def delete(self, name: str) -> bool:
        """Delete an object. After a retry, False may mean that an earlier attempt deleted it."""
        require_name(name)
        status, _ = await self._ask(f"deleting {name}", "DELETE", self._object_url(name), 200, 204, 404)
        return status != 404

    async def delete_prefix(self, prefix: str) -> int:
        """Delete objects. After a retry, the count may lack those that an earlier attempt deleted."""
        what, url = f"deleting {prefix!r}*", self.url + wire.Route.OBJECTS
        count = idle_turns = 0
        while idle_turns < _MAX_IDLE_TURNS:
            _, body = await self._ask(what, "DELETE", url, most=wire.MAX_SMALL_ANSWER_BYTES, params={"prefix": prefix})
            answer = decode_json(what, body, wire.Deleted)
            count += answer.deleted
            if not answer.more:
                return count
            idle_turns = 0 if answer.deleted else idle_turns + 1
        raise StoreError("protocol", f"{what}: the store deletes nothing, but reports more objects")

    async def report_damage(self, manifest_name: str) -> bool:
        """Return False, too, if the server is busy checking others."""
        require_name(manifest_name)
        what, url = f"reporting {manifest_name}", f"{self.url}{wire.Route.CHECK}/{manifest_name}"
        _, body = await self._ask(what, "POST", url, most=wire.MAX_SMALL_ANSWER_BYTES)
        return decode_json(what, body, wire.Checked).deleted

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Stream the listing. Failures are retried up to the first line; each later line has its own deadline."""
        what = listing_of(prefix)

        async def start() -> tuple[aiohttp.ClientResponse, bytes]:
            response = await self._request("GET", self.url + wire.Route.OBJECTS, params={"prefix": prefix})
            try:
                await require_status(response, 200)
                return response, await _read_line(response)
            except BaseException:
                response.close()
                raise

        response, line = await self._retried(what, start)
        with self._naming_itself(), client_errors(what):
            async with response:
                while line:
                    yield decode_listed(line, prefix)
                    async with self._deadline(what):
                        line = await _read_line(response)

    async def lookup(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        require_namespace(namespace)
        assert all(len(page_hash) == PAGE_HASH_BYTES for page_hash in page_hashes)
        hits: tuple[SegmentHit, ...] = ()
        for first in range(0, len(page_hashes), wire.MAX_LOOKUP_PAGES):
            asked = page_hashes[first : first + wire.MAX_LOOKUP_PAGES]
            found = await self._lookup_once(namespace, asked)
            hits += found.hits
            if found.num_pages < len(asked):
                break
        return Lookup(hits)

    async def _lookup_once(self, namespace: str, page_hashes: Sequence[bytes]) -> Lookup:
        request = msgspec.msgpack.encode(wire.LookupRequest(namespace, b"".join(page_hashes)))
        headers = {"Content-Type": wire.MSGPACK_TYPE}
        what, url = f"looking up {len(page_hashes)} pages in {namespace}", self.url + wire.Route.LOOKUP
        most = wire.MAX_LOOKUP_ANSWER_BYTES
        _, body = await self._ask(what, "POST", url, most=most, headers=headers, body=request, watch=self._lookups)
        return decode_hits(what, body, len(page_hashes))

    async def folders(self, digest: str = "") -> frozenset[str]:
        what = f"listing folders of {digest or 'all namespaces'}"
        url = self.url + wire.Route.FOLDERS + (digest and f"/{digest}")
        _, body = await self._ask(what, "GET", url, most=wire.MAX_FOLDERS_BYTES)
        return frozenset(decode_json(what, body, wire.Folders).folders)

    async def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        what, url = f"listing {kind.name}", f"{self.url}{wire.Route.NOTES}/{kind.name}"
        _, body = await self._ask(what, "GET", url, most=wire.MAX_LISTED_NOTE_BYTES * (kind.max_notes + 1))
        return kind.require_list(what, decode_json(what, body, wire.Notes).notes)

    async def get_note(self, kind: NoteKind, name: str, length: int | None = None) -> bytes | None:
        what, url = f"getting {kind.one} {name}", self._note_url(kind, name, length)
        if length is None:
            return await self._get(what, url, kind.max_bytes)
        into = bytearray(length)
        return bytes(into) if await self._read(what, url, 0, length, [memoryview(into)]) else None

    async def put_note(self, kind: NoteKind, name: str, data: bytes) -> None:
        what, url, headers = f"putting {kind.one} {name}", self._note_url(kind, name), {"Content-Type": wire.BYTES_TYPE}
        await self._ask(what, "PUT", url, 201, headers=headers, body=data, num_bytes=len(data))

    async def delete_note(self, kind: NoteKind, name: str) -> bool:
        status, _ = await self._ask(f"deleting {kind.one} {name}", "DELETE", self._note_url(kind, name), 204, 404)
        return status != 404

    def _note_url(self, kind: NoteKind, name: str, length: int | None = None) -> str:
        return f"{self.url}{wire.Route.NOTES}/{kind.name}/{kind.require(name, length)}"

    async def tell_audits(self, folder: str, audits: Audits) -> None:
        what, url = "telling the store what audits found", f"{self.url}{wire.Route.AUDITS}/{folder}"
        await self._ask(what, "PUT", url, 204, 404, body=msgspec.json.encode(audits))  # 404: the folder was deleted

    async def close(self) -> None:
        self._end_calls()
        session, self._session = self._session, None
        if session is not None:
            await session.close()
        if self._moves is not None:
            self._moves.close()

    def _object_url(self, name: str) -> str:
        return f"{self.url}{wire.Route.OBJECTS}/{name}"

    def _request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: Sequence[memoryview] | None = None,
    ) -> aiohttp.client._RequestContextManager:
        """Begin a request. The session is made by the first one, within the event loop that uses it."""
        self._require_open()
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Half of them for reads, which are among these behind a proxy.
                connector=aiohttp.TCPConnector(limit=2 * self.options.max_connections, ssl=self._tls),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.options.connect_timeout_s),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 20,
                proxy=self._proxy,
            )
        headers = {**self._headers, **(headers or {})}
        if body is not None:
            headers["Content-Length"] = str(sum(map(len, body)))
        # Redirects would carry the token to another host.
        return self._session.request(
            method,
            url,
            headers=headers,
            params=params,
            data=None if body is None else _pieces(body),
            allow_redirects=False,
        )

    async def _ask(
        self,
        what: str,
        method: str,
        url: str,
        *expected: int,
        most: int = 0,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        num_bytes: int = 0,
        watch: StallWatch = _ENDLESS,
    ) -> tuple[int, bytes]:
        """Send a request. Return the answer's status, one of ``expected`` (by default 200), and its body.

        The body is read only if the status is 200, and up to ``most`` bytes.
        """

        async def ask(heard: Callable[[], None]) -> tuple[int, bytes]:
            views = None if body is None else [memoryview(body)]
            async with self._request(method, url, headers=headers, params=params, body=views) as response:
                await require_status(response, *(expected or (200,)))
                is_read = most and response.status == 200
                return response.status, await read_whole(response, most, heard) if is_read else b""

        return await self._retried(what, lambda: watch.answer(what, ask), num_bytes)

    async def _follow_files(self) -> None:
        """Let what is asked from now on have the certificates and the token that the files hold."""
        if isinstance(self._tls, FreshContext):
            await self._tls.files.follow()
        if self._token_file is not None:
            await self._token_file.follow()
            self._headers["Authorization"] = f"Bearer {self._token_file.value}"

    async def _retried(
        self, what: str, attempt: Callable[[], Awaitable[T]], num_bytes: int = 0, most_cut: int | None = None
    ) -> T:
        """Call ``attempt`` until it succeeds. The deadline is extended for ``num_bytes`` that are to be transferred.
        ``most_cut``: how often it may be cut on the way, by default as often as it may fail.

        Raises the last attempt's StoreError, or ``timeout`` once the deadline passes.
        """
        options, began_s, number = self.options, asyncio.get_running_loop().time(), 0

        def pause_s(error: StoreError) -> float | None:
            """Return how long to wait before the next attempt; None if there is none."""
            is_cut_again = most_cut is not None and error.reason in _CUTS and number >= most_cut
            if is_cut_again or number >= options.max_attempts or not (error.retriable and error.reason in RETRIED):
                return None
            pause_s = random.uniform(0, min(timeout_s, options.backoff_s * 2.0 ** (number - 1)))
            return pause_s if asyncio.get_running_loop().time() + pause_s < began_s + timeout_s else None

        with self._naming_itself():
            async with self._deadline(what, num_bytes) as timeout_s:
                while True:
                    number += 1
                    try:
                        with client_errors(what):
                            await self._follow_files()
                            return await attempt()
                    except StoreError as e:
                        if (wait_s := pause_s(e)) is None:
                            raise
                        options.on_retry(e)
                    await asyncio.sleep(wait_s)


async def _read_line(response: aiohttp.ClientResponse) -> bytes:
    """Return the next line, or b"" at the end."""
    return await response.content.readline(max_line_length=wire.MAX_LINE_BYTES)


async def _pieces(views: Sequence[memoryview]) -> AsyncIterator[memoryview]:
    """Yield a body in pieces, so that other tasks can run in between. Each attempt needs a new iterator."""
    for view in views:
        for start in range(0, len(view), _SEND_PIECE_BYTES):
            yield view[start : start + _SEND_PIECE_BYTES]


def _http_date_s(value: str | None) -> float:
    """Convert an HTTP date to seconds since the epoch; 0 if it is missing or malformed."""
    if value is None:
        return 0.0
    try:
        return parsedate_to_datetime(value).timestamp()
    except (ValueError, OverflowError):
        return 0.0
