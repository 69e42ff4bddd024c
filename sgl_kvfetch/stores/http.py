"""Client of a store behind HTTP: ``kvfetch serve``, or any server that offers the same paths."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    stop_before_delay,
    wait_random_exponential,
)

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores import wire
from sgl_kvfetch.stores.base import Lookup, ObjectInfo, SegmentHit, Store, object_digest
from sgl_kvfetch.stores.http_answers import (
    client_errors,
    decode_hits,
    decode_listed,
    decode_small,
    read_range,
    read_whole,
    require_status,
    take_range,
)
from sgl_kvfetch.stores.names import require_name, require_namespace
from sgl_kvfetch.stores.pins import MAX_PIN_BYTES, Pin, decode_pin, require_pin_name

T = TypeVar("T")

# Reasons for which a retry makes sense at once. A full store, for example, stays full.
RETRIED = frozenset({"refused", "server", "truncated", "timeout"})
_SEND_PIECE_BYTES = 1 << 20
_MAX_IDLE_TURNS = 16  # of a deletion by prefix, in a row
_MAX_REPLACES = 4


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for ``https://``."""

    ca: str | None = None  # CAs that may have signed the server's certificate; by default the system's
    cert: str | None = None  # our own certificate, for servers that demand one
    key: str | None = None  # its key, if it is not in the same file

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError if a file cannot be read or has no certificate."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password="")  # never asks on a terminal
        except OSError as e:
            files = ", ".join(name for name in (self.ca, self.cert, self.key) if name)
            raise ConfigError(f"cannot use the TLS files {files}: {e}") from e
        return context


@dataclass(frozen=True, slots=True)
class HttpOptions:
    timeout_s: float = 30.0  # for one call, including retries and the wait for a connection
    # A put, or a get of a given length, may take longer by the time that its bytes need at this speed.
    min_bytes_per_s: float = 8e6
    connect_timeout_s: float = 5.0  # for one attempt
    max_connections: int = 32
    max_attempts: int = 4
    backoff_s: float = 0.1  # upper bound before the first retry; doubles each time; the wait is random below it
    max_object_bytes: int = 1 << 30  # the largest body that is read into memory
    on_retry: Callable[[StoreError], None] | None = None  # called before each retry, on the event loop
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        for field in (
            "timeout_s",
            "min_bytes_per_s",
            "connect_timeout_s",
            "max_connections",
            "max_attempts",
            "max_object_bytes",
        ):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; expected more than 0")
        if self.backoff_s < 0:
            raise ConfigError(f"backoff_s is {self.backoff_s}; expected 0 or more")


class HttpStore(Store):
    """One pool of connections. The first call creates it, on the event loop of that call.

    Every request is idempotent, so attempts that failed in the network or on the server are retried until the
    deadline. Answers are not trusted: one that is too large or malformed raises StoreError.
    """

    def __init__(self, url: str, *, token: str | None = None, options: HttpOptions | None = None) -> None:
        """Raises ConfigError unless ``url`` is http(s)://host[:port][/path] and ``token`` printable ASCII.

        Raises ConfigError, too, if a file of ``options.tls`` cannot be used.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ConfigError(f"store URL {url!r} is not http(s)://host[:port][/path]")
        if parts.username or parts.password:
            raise ConfigError("a store URL must not contain a user or a password; use a token")
        if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
            raise ConfigError("the token is not allowed: expected printable ASCII without spaces around it")
        self.url = url.rstrip("/")
        self.options = options or HttpOptions()
        self._tls = self.options.tls.context() if self.options.tls and parts.scheme == "https" else True
        self._headers = {"Accept-Encoding": "identity"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Also raises ``too_large`` for more bytes than ``max_object_bytes``, or than a manifest may have.

        Without ``length``, the size is not known in advance, so the deadline is ``timeout_s``.
        """
        assert start >= 0
        assert length is None or length >= 0
        parsed = require_name(name)
        most = MAX_MANIFEST_BYTES if parsed.is_manifest else self.options.max_object_bytes
        if length == 0:  # HTTP has no empty range
            return await self._get_nothing(name, start)
        if length is not None and length > most:
            raise StoreError("too_large", f"getting {name}: asked for {length} bytes, the limit is {most}")
        whole = start == 0 and length is None
        headers = {} if whole else {"Range": f"bytes={start}-{start + length - 1 if length else ''}"}

        async def attempt() -> bytes | None:
            async with self._request("GET", self._object_url(name), headers=headers) as response:
                if response.status == 404:
                    return None
                if whole:
                    await require_status(response, 200)
                    return await read_whole(response, most)
                return await read_range(response, start, length, most)

        return await self._retried(f"getting {name}", attempt, length or 0)

    async def read(self, name: str, start: int, length: int, take: Callable[[bytes], None]) -> bool:
        """A retry continues where the broken attempt ended."""
        most = MAX_MANIFEST_BYTES if require_name(name).is_manifest else self.options.max_object_bytes
        if length > most:
            raise StoreError("too_large", f"reading {name}: asked for {length} bytes, the limit is {most}")
        position, end = start, start + length

        def take_next(piece: bytes) -> None:
            nonlocal position
            position += len(piece)
            take(piece)

        async def attempt() -> bool:
            headers = {"Range": f"bytes={position}-{end - 1}"}
            async with self._request("GET", self._object_url(name), headers=headers) as response:
                if response.status == 404:
                    return False
                await take_range(response, position, end - position, take_next)
                return True

        if length == 0:
            return await self._get_nothing(name, start) is not None
        return await self._retried(f"reading {name}", attempt, length)

    async def _get_nothing(self, name: str, start: int) -> bytes | None:
        info = await self.head(name)
        if info is not None and start > info.size_bytes:
            raise StoreError("truncated", f"{name} has {info.size_bytes} bytes; cannot read from byte {start} on")
        return None if info is None else b""

    async def put(self, name: str, data: bytes) -> None:
        """A server may demand that a stored manifest is replaced by its digest; then this does so."""
        if await self._put(f"putting {name}", name, data, {}):
            return
        for _ in range(_MAX_REPLACES):
            current = await self.get(name)
            tag = {"If-None-Match": "*"} if current is None else {"If-Match": wire.entity_tag(object_digest(current))}
            if current == data or await self._put(f"replacing {name}", name, data, tag):
                return
        raise StoreError("server", f"putting {name}: others replaced it {_MAX_REPLACES} times", retriable=True)

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Uses ``If-Match``, which the server must support. Raises as ``put`` does."""
        if not require_name(name).is_manifest:
            raise StoreError("invalid", f"{name} is not a manifest; data objects are never replaced")
        tag = {"If-Match": wire.entity_tag(expected_digest)}
        # An earlier attempt may have replaced it and lost only its answer.
        return await self._put(f"replacing {name}", name, data, tag) or await self.get(name) == data

    async def _put(self, what: str, name: str, data: bytes, condition: Mapping[str, str]) -> bool:
        """Return False if the server says that the condition does not hold."""
        is_manifest = require_name(name).is_manifest
        headers = {"Content-Type": wire.BYTES_TYPE, **condition}

        async def attempt() -> bool:
            async with self._request("PUT", self._object_url(name), headers=headers, body=data) as response:
                if is_manifest and response.status == 412:
                    return False
                await require_status(response, 200, 201, 204)
                return True

        return await self._retried(what, attempt, len(data))

    async def head(self, name: str) -> ObjectInfo | None:
        """The modification time is in whole seconds; it is 0 if the server sends none."""
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
        """After a retry, False may mean that an earlier attempt deleted it."""
        require_name(name)

        async def attempt() -> bool:
            async with self._request("DELETE", self._object_url(name)) as response:
                if response.status == 404:
                    return False
                await require_status(response, 200, 204)
                return True

        return await self._retried(f"deleting {name}", attempt)

    async def delete_prefix(self, prefix: str) -> int:
        """Use a few requests by prefix, or one per object if the server does not support that.

        After a retry, the count may lack objects that an earlier attempt deleted.
        """
        what = f"deleting {prefix!r}*"

        async def attempt() -> bytes | None:
            url = self.url + wire.OBJECTS_PATH
            async with self._request("DELETE", url, params={"prefix": prefix}) as response:
                if response.status in (404, 405, 501):
                    return None
                await require_status(response, 200)
                return await read_whole(response, wire.MAX_SMALL_ANSWER_BYTES)

        count = turns = 0
        while (body := await self._retried(what, attempt)) is not None:
            answer = decode_small(what, body, wire.Deleted)
            count += answer.deleted
            if not answer.more:
                return count
            turns = 0 if answer.deleted else turns + 1
            if turns == _MAX_IDLE_TURNS:
                raise StoreError("protocol", f"{what}: the store deletes nothing, but says that there is more")
        return count + await super().delete_prefix(prefix)

    async def report_damage(self, manifest_name: str) -> bool:
        """Return False, too, if the server does not check segments, or is busy checking others."""
        require_name(manifest_name)

        async def attempt() -> bytes | None:
            url = f"{self.url}{wire.CHECK_PATH}/{manifest_name}"
            async with self._request("POST", url) as response:
                if response.status in (404, 405, 501):
                    return None
                await require_status(response, 200)
                return await read_whole(response, wire.MAX_SMALL_ANSWER_BYTES)

        what = f"reporting {manifest_name}"
        body = await self._retried(what, attempt)
        return body is not None and decode_small(what, body, wire.Checked).deleted

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """Stream the listing. Failures are retried up to the first line; each later line has its own deadline."""
        what = f"listing {prefix!r}"

        async def start() -> tuple[aiohttp.ClientResponse, bytes]:
            response = await self._request("GET", self.url + wire.OBJECTS_PATH, params={"prefix": prefix})
            try:
                await require_status(response, 200)
                return response, await _read_line(response)
            except BaseException:
                response.close()
                raise

        response, line = await self._retried(what, start)
        with client_errors(what):
            async with response:
                while line:
                    yield decode_listed(line, prefix)
                    async with self._deadline(what, self.options.timeout_s):
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
        body = msgspec.msgpack.encode(wire.LookupRequest(namespace, b"".join(page_hashes)))
        headers = {"Content-Type": wire.MSGPACK_TYPE}

        async def attempt() -> bytes:
            url = self.url + wire.LOOKUP_PATH
            async with self._request("POST", url, headers=headers, body=body) as response:
                await require_status(response, 200)
                return await read_whole(response, wire.MAX_LOOKUP_ANSWER_BYTES)

        what = f"looking up {len(page_hashes)} pages in {namespace}"
        return decode_hits(what, await self._retried(what, attempt), len(page_hashes))

    async def folders(self, digest: str = "") -> frozenset[str]:
        """Return none if the server does not list folders."""
        what = f"listing folders of {digest or 'all namespaces'}"
        url = self.url + wire.FOLDERS_PATH + (digest and f"/{digest}")

        async def attempt() -> bytes | None:
            async with self._request("GET", url) as response:
                if response.status in (404, 405, 501):
                    return None
                await require_status(response, 200)
                return await read_whole(response, wire.MAX_FOLDERS_BYTES)

        body = await self._retried(what, attempt)
        return frozenset() if body is None else frozenset(decode_small(what, body, wire.Folders).folders)

    async def pins(self) -> Sequence[str]:
        async def attempt() -> bytes:
            async with self._request("GET", self.url + wire.PINS_PATH) as response:
                await require_status(response, 200)
                return await read_whole(response, wire.MAX_PIN_NAMES_BYTES)

        what = "listing pins"
        return decode_small(what, await self._retried(what, attempt), wire.PinNames).names

    async def get_pin(self, name: str) -> Pin | None:
        async def attempt() -> bytes | None:
            async with self._request("GET", self._pin_url(name)) as response:
                if response.status == 404:
                    return None
                await require_status(response, 200)
                return await read_whole(response, MAX_PIN_BYTES)

        content = await self._retried(f"getting pin {name}", attempt)
        try:
            return None if content is None else decode_pin(content)
        except FormatError as e:
            raise StoreError("protocol", f"getting pin {name}: {e}") from e

    async def put_pin(self, pin: Pin) -> None:
        async def attempt() -> None:
            async with self._request("PUT", self._pin_url(pin.name), body=pin.encode()) as response:
                await require_status(response, 201)

        await self._retried(f"putting pin {pin.name}", attempt)

    async def delete_pin(self, name: str) -> bool:
        async def attempt() -> bool:
            async with self._request("DELETE", self._pin_url(name)) as response:
                if response.status == 404:
                    return False
                await require_status(response, 204)
                return True

        return await self._retried(f"deleting pin {name}", attempt)

    def _pin_url(self, name: str) -> str:
        return f"{self.url}{wire.PINS_PATH}/{require_pin_name(name)}"

    async def close(self) -> None:
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    def _object_url(self, name: str) -> str:
        return f"{self.url}{wire.OBJECTS_PATH}/{name}"

    def _request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> aiohttp.client._RequestContextManager:
        if self._closed:
            raise StoreError("io", f"the client of {self.url} is closed")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self.options.max_connections, ssl=self._tls),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.options.connect_timeout_s),
                headers=self._headers,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                read_bufsize=1 << 20,
            )
        if body is not None:
            headers = {**(headers or {}), "Content-Length": str(len(body))}
        # Redirects would carry the token to another host.
        return self._session.request(
            method,
            url,
            headers=headers,
            params=params,
            data=None if body is None else _pieces(body),
            allow_redirects=False,
        )

    @asynccontextmanager
    async def _deadline(self, what: str, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError as e:
            message = f"{what}: no answer from {self.url} within {timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e

    async def _retried(self, what: str, attempt: Callable[[], Awaitable[T]], num_bytes: int = 0) -> T:
        """Call ``attempt`` until it succeeds. The deadline is extended for ``num_bytes`` that are to be transferred.

        Raises the last attempt's StoreError, or ``timeout`` once the deadline passes.
        """
        options = self.options
        timeout_s = options.timeout_s + num_bytes / options.min_bytes_per_s

        def note_retry(state: RetryCallState) -> None:
            error = state.outcome.exception() if state.outcome else None
            if options.on_retry is not None and isinstance(error, StoreError):
                options.on_retry(error)

        retrying = AsyncRetrying(
            stop=stop_after_attempt(options.max_attempts) | stop_before_delay(timeout_s),
            wait=wait_random_exponential(options.backoff_s, max=timeout_s),
            retry=retry_if_exception(_may_help),
            before_sleep=note_retry,
            reraise=True,
        )

        async def translated() -> T:
            with client_errors(what):
                return await attempt()

        async with self._deadline(what, timeout_s):
            return await retrying(translated)


async def _read_line(response: aiohttp.ClientResponse) -> bytes:
    """Return the next line, or b"" at the end."""
    return await response.content.readline(max_line_length=wire.MAX_LINE_BYTES)


def _may_help(error: BaseException) -> bool:
    return isinstance(error, StoreError) and error.retriable and error.reason in RETRIED


async def _pieces(data: bytes) -> AsyncIterator[memoryview]:
    """Yield a body in pieces, so that other tasks can run in between. Each attempt needs a new iterator."""
    view = memoryview(data)
    for start in range(0, len(view), _SEND_PIECE_BYTES):
        yield view[start : start + _SEND_PIECE_BYTES]


def _http_date_s(value: str | None) -> float:
    """Convert an HTTP date to seconds since the epoch; 0 if it is missing or malformed."""
    if value is None:
        return 0.0
    try:
        return parsedate_to_datetime(value).timestamp()
    except ValueError:
        return 0.0
