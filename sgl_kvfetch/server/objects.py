"""The HTTP handlers of objects: put, get with ranges, head, delete one or by prefix, list; and those of notes."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from io import FileIO

import msgspec
from aiohttp import web

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES
from sgl_kvfetch.directory import FrontStore, LocalStore
from sgl_kvfetch.directory.files import OpenObject, open_object, os_errors, read_fully
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import ObjectName, parse_object_name
from sgl_kvfetch.server.bodies import (
    ACCOUNT,
    BodyReader,
    BodyTooLarge,
    Overloaded,
    error_answer,
    json_answer,
    require_fits,
)
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.tokens import ROLE, Role, require_role
from sgl_kvfetch.stores import NOTE_KINDS, NoteKind, ObjectInfo
from sgl_kvfetch.stores.wire import BYTES_TYPE, NDJSON_TYPE, Checked, Deleted, Notes, parse_entity_tag

_LIST_PIECE_BYTES = 64 << 10
_CHECKED_TIMES = 6  # memory for what is checked of a note, in sizes of its bytes
_MANIFEST_TIMES = 8  # memory for a decoded manifest, in sizes of its bytes
# One deletion by prefix stops after this time, well below clients' deadlines. Clients repeat it until all is deleted.
_DELETE_TURN_S = 5.0
_SENDFILE_BYTES = 1 << 20  # by one call, which keeps the event loop from anything else
_TLS_PIECE_BYTES = 256 << 10
_RECENT_S = 5.0
_MAX_RECENT = 4096
_PASSED_BYTES = 4 << 20  # that an answer from the upstream holds
_PASSED_AT_ONCE = 16  # such answers; further ones wait, or together they would take all memory for requests
_ONE_RANGE = re.compile("bytes=([0-9]{1,18})-([0-9]{1,18})")
_NO_BYTES = re.compile("bytes=-0+")  # aiohttp takes it for all


class ObjectHandlers:
    def __init__(self, store: LocalStore, bodies: BodyReader, metrics: ServerMetrics, config: ServerConfig) -> None:
        self._store = store
        self._bodies = bodies
        self._opener = Opener(store)
        self._metrics = metrics
        self._max_body_bytes = min(config.max_body_bytes, config.capacity_bytes or config.max_body_bytes)
        self._upload_wait_s = config.upload_wait_s
        self._uploads = asyncio.Semaphore(config.max_uploads)
        self._passing = asyncio.Semaphore(_PASSED_AT_ONCE)

    async def put(self, request: web.Request) -> web.StreamResponse:
        name = _name(request)
        async with self._upload_slot():
            if name.is_manifest:
                return await self._put_manifest(request, name.segment.manifest_name)
            return await self._put_data(request)

    async def _put_manifest(self, request: web.Request, name: str) -> web.StreamResponse:
        """Store a manifest. Only admins replace one without ``If-Match`` and its digest."""
        only_if, only_new = request.headers.get("If-Match"), _only_new(request)
        expected = None if only_if is None else parse_entity_tag(only_if)
        if (only_if is None) != (expected is None):
            raise web.HTTPBadRequest(text="If-Match: expected one entity tag with the digest of a manifest")
        body = await self._bodies.read_body(request, min(self._max_body_bytes, MAX_MANIFEST_BYTES), _MANIFEST_TIMES)
        if expected is not None:
            is_stored = await self._store.replace(name, body, expected)
        elif only_new or request[ROLE] < Role.ADMIN:
            is_stored = await self._store.create(name, body)
        else:
            await self._store.put(name, body)
            is_stored = True
        if is_stored:
            return web.Response(status=201)
        return error_answer(412, "changed", "the stored manifest is another one; replace it with If-Match")

    async def _put_data(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["name"]
        if "If-Match" in request.headers:
            raise web.HTTPBadRequest(text="If-Match is only for manifests")
        if _only_new(request) and await self._store.head(name) is not None:
            return error_answer(412, "exists", "the object exists already")
        require_fits(request, self._max_body_bytes)
        received = 0
        async with self._store.upload(name, request.content_length) as upload:
            while piece := await self._bodies.read_piece(request):
                received += len(piece)
                if received > self._max_body_bytes:
                    raise BodyTooLarge(self._max_body_bytes)
                await upload.write(piece)
            await upload.commit()
        return web.Response(status=201)

    @asynccontextmanager
    async def _upload_slot(self) -> AsyncIterator[None]:
        """Limit concurrent uploads. Answer 503 if no slot becomes free within ``upload_wait_s``."""
        try:
            async with asyncio.timeout(self._upload_wait_s):
                await self._uploads.acquire()
        except TimeoutError as e:
            busy = Overloaded("uploads", "too many concurrent uploads")
            busy.headers["Connection"] = "close"
            raise busy from e
        try:
            yield
        finally:
            self._uploads.release()

    async def get(self, request: web.Request) -> web.StreamResponse:
        is_manifest, front = _name(request).is_manifest, self._store if isinstance(self._store, FrontStore) else None
        if front is not None and is_manifest:
            return await self._send_manifest(request, front)
        opened = await self._opener.open(request.match_info["name"])
        if opened is not None:
            with opened.file:
                return await self._send(request, opened)
        if front is None:
            return _not_found(request)
        async with self._passing:
            return await self._pass_on(request, front)

    async def _send_manifest(self, request: web.Request, front: FrontStore) -> web.StreamResponse:
        content = await front.get_manifest(request.match_info["name"])
        if content is None:
            return _not_found(request)
        start, end = _range_of(request, len(content))
        self._metrics.sent_bytes.inc(end - start)
        response = web.Response(body=content[start:end], content_type=BYTES_TYPE)
        _record_range(request, response, start, end, len(content))
        return response

    async def _pass_on(self, request: web.Request, front: FrontStore) -> web.StreamResponse:
        """Answer with data that only the upstream has, as it comes."""
        name, size = request.match_info["name"], None
        asked = request.headers.get("Range")
        span = None if asked is None else _ONE_RANGE.fullmatch(asked)
        if span is None or int(span[2]) < int(span[1]):  # of all other ranges, the size says what they are
            info = await front.head(name)
            if info is None:
                return _not_found(request)
            size = info.size_bytes
            start, end = _range_of(request, size)
        else:
            start, end = int(span[1]), int(span[2]) + 1
        response = web.StreamResponse(headers={"Accept-Ranges": "bytes", "Content-Type": BYTES_TYPE})
        _record_range(request, response, start, end, size)
        response.content_length = end - start
        request[ACCOUNT].take(min(_PASSED_BYTES, end - start))

        async def send(piece: memoryview) -> None:
            if not response.prepared:
                await response.prepare(request)
            await response.write(piece)
            self._metrics.sent_bytes.inc(len(piece))

        if end > start and not await front.pass_on(name, start, end - start, send):
            return _not_found(request)
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response

    async def list_notes(self, request: web.Request) -> web.StreamResponse:
        return json_answer(Notes(list(await self._store.notes(_kind(request)))))

    async def get_note(self, request: web.Request) -> web.StreamResponse:
        kind, span = _kind(request), _ONE_RANGE.fullmatch(request.headers.get("Range", ""))
        head = None if span is None or int(span[2]) >= kind.checked_bytes else int(span[2]) + 1
        opened = await self._store.open_note(kind, request.match_info["name"], head)
        if opened is None:
            return _no_note(request)
        with opened.file:
            return await self._send(request, opened)

    async def put_note(self, request: web.Request) -> web.StreamResponse:
        """Keep a note. Only admins may change pins (`authorised`): a pin keeps others out."""
        kind, name, size_bytes = _kind(request), request.match_info["name"], request.content_length
        if size_bytes is None:
            raise web.HTTPLengthRequired(text=f"a {kind.one} needs a Content-Length")
        require_fits(request, min(self._max_body_bytes, kind.max_bytes))
        request[ACCOUNT].take(_CHECKED_TIMES * min(size_bytes, kind.checked_bytes))
        async with self._upload_slot(), self._store.upload_note(kind, name, size_bytes) as upload:
            while piece := await self._bodies.read_piece(request):
                await upload.write(piece)
            await upload.commit()
        return web.Response(status=201)

    async def delete_note(self, request: web.Request) -> web.StreamResponse:
        if await self._store.delete_note(_kind(request), request.match_info["name"]):
            return web.Response(status=204)
        return _no_note(request)

    async def _send(self, request: web.Request, opened: OpenObject) -> web.StreamResponse:
        """Answer with a file, or with the range of it that the request asks for."""
        size = opened.info.size_bytes
        response = web.StreamResponse(headers=_headers(opened.info))
        start, end = _range_of(request, size)
        _record_range(request, response, start, end, size)
        response.content_length = end - start
        await response.prepare(request)
        try:
            await send_file(request, response, opened.file, start, end)
        except ConnectionError:
            raise
        except OSError as e:  # the disk's
            raise StoreError("io", f"reading {opened.info.name}: {e.strerror}") from e
        self._metrics.sent_bytes.inc(end - start)
        await response.write_eof()
        return response

    async def head(self, request: web.Request) -> web.StreamResponse:
        _name(request)
        info = await self._store.head(request.match_info["name"])
        if info is None:
            return _not_found(request)
        return web.Response(headers=_headers(info) | {"Content-Length": str(info.size_bytes)})

    async def delete(self, request: web.Request) -> web.StreamResponse:
        _name(request)
        if await self._store.delete(request.match_info["name"]):
            return web.Response(status=204)
        return _not_found(request)

    async def check(self, request: web.Request) -> web.StreamResponse:
        """Check a segment that a reader found damaged."""
        return json_answer(Checked(await self._store.report_damage(_name(request).segment.manifest_name)))

    async def delete_prefix(self, request: web.Request) -> web.StreamResponse:
        """Delete by prefix. It is required, even if it is empty, so that no client empties a store by omitting it.

        Only admins delete by a prefix that is shorter than a namespace.
        """
        prefix = request.query.get("prefix")
        if prefix is None:
            raise web.HTTPBadRequest(text="the query parameter prefix is missing")
        if "/" not in prefix:
            require_role(request, Role.ADMIN)
        deleted, more = await self._store.delete_some(prefix, _DELETE_TURN_S)
        return json_answer(Deleted(deleted, more))

    async def list(self, request: web.Request) -> web.StreamResponse:
        """Send one JSON object per line. If listing fails midway, the body ends without its final chunk."""
        response = web.StreamResponse(headers={"Content-Type": NDJSON_TYPE})
        lines = bytearray()
        await response.prepare(request)
        async for info in self._store.list(request.query.get("prefix", "")):
            lines += msgspec.json.encode(info) + b"\n"
            if len(lines) >= _LIST_PIECE_BYTES:
                await self._send_lines(response, lines)
        await self._send_lines(response, lines)
        await response.write_eof()
        return response

    async def _send_lines(self, response: web.StreamResponse, lines: bytearray) -> None:
        if lines:
            await response.write(bytes(lines))
            self._metrics.sent_bytes.inc(len(lines))
            lines.clear()


def _name(request: web.Request) -> ObjectName:
    try:
        return parse_object_name(request.match_info["name"])
    except FormatError as e:
        raise web.HTTPBadRequest(text=str(e)) from e


class _NoSuchRange(web.HTTPRequestRangeNotSatisfiable):
    def __init__(self, header: str, size: int) -> None:
        headers = {"Content-Range": f"bytes */{size}"}
        super().__init__(text=f"expected one range within {size} bytes, found {header[:80]!r}", headers=headers)


def _range_of(request: web.Request, size: int) -> tuple[int, int]:
    """Return which bytes of an object a request asks for: from, to. Raises HTTPException.

    RFC 9110 would ignore malformed and multiple ranges, and send the whole object: a large answer to a mistake. Our
    clients send neither, so both are errors.
    """
    header = request.headers.get("Range")
    try:
        start, end, _ = request.http_range.indices(size)
    except ValueError:
        start = end = size
    if header is not None and (start >= end or _NO_BYTES.fullmatch(header)):
        raise _NoSuchRange(header, size)
    return start, end


def _record_range(request: web.Request, response: web.StreamResponse, start: int, end: int, size: int | None) -> None:
    if "Range" in request.headers:
        response.set_status(206)
        response.headers["Content-Range"] = f"bytes {start}-{end - 1}/{'*' if size is None else size}"


def _kind(request: web.Request) -> NoteKind:
    return NOTE_KINDS[request.match_info["kind"]]


def _no_note(request: web.Request) -> web.Response:
    return error_answer(404, "not_found", f"no {_kind(request).one} {request.match_info['name']}")


def _only_new(request: web.Request) -> bool:
    """Return whether the request has ``If-None-Match: *``. Raises HTTPBadRequest for entity tags."""
    value = request.headers.get("If-None-Match")
    if value not in (None, "*"):
        raise web.HTTPBadRequest(text="If-None-Match: expected *")
    return value is not None


def _headers(info: ObjectInfo) -> dict[str, str]:
    return {
        "Accept-Ranges": "bytes",
        "Content-Type": BYTES_TYPE,
        "Last-Modified": formatdate(info.modified_s, usegmt=True),
    }


def _not_found(request: web.Request) -> web.Response:
    return error_answer(404, "not_found", f"no object {request.match_info['name']}")


async def send_file(request: web.Request, response: web.StreamResponse, file: FileIO, start: int, end: int) -> None:
    """Send bytes ``[start, end)`` of ``file``. Raises ConnectionError if the client leaves, or the file is shorter."""
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has disconnected")
    if transport.get_extra_info("sslcontext") is None and not transport.get_write_buffer_size():
        await _sendfile(transport.get_extra_info("socket").fileno(), file.fileno(), start, end)
        return
    while start < end:
        piece = await asyncio.to_thread(read_fully, file, start, min(_TLS_PIECE_BYTES, end - start))
        if not piece:
            raise ConnectionResetError("the file is shorter than expected")
        await response.write(piece)
        start += len(piece)


async def _sendfile(socket_fd: int, file_fd: int, start: int, end: int) -> None:
    """Have the kernel copy bytes from the file to the socket.

    ``loop.sendfile`` would do the same, but it waits after each call even if the socket has room, does not notice that
    the client leaves, and then fails with errors of its own.
    """
    # Ours: the transport may close its descriptor at any time, and the loop watches for writing only one of them.
    fd = os.dup(socket_fd)
    try:
        while start < end:
            try:
                sent = os.sendfile(fd, file_fd, start, min(_SENDFILE_BYTES, end - start))
            except BlockingIOError:
                await _writable(fd)
                continue
            if not sent:
                raise ConnectionResetError("the file is shorter than expected")
            start += sent
    finally:
        os.close(fd)


async def _writable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    is_writable = loop.create_future()
    loop.add_writer(fd, _set, is_writable)
    try:
        await is_writable
    finally:
        loop.remove_writer(fd)


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class Opener:
    """Opens objects for clients that read one object in many ranges: a thread for each would cost as much as all else.

    A thread opens an object only if that has not happened for some seconds: then the kernel knows where it is. Only
    the thread tells the store that the object is in use.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._recent: OrderedDict[str, float] = OrderedDict()  # when a thread opened it, oldest first

    async def open(self, name: str) -> OpenObject | None:
        """Open an object; the caller closes it. None if it is missing. Raises StoreError."""
        now_s = time.monotonic()
        while self._recent and next(iter(self._recent.values())) < now_s - _RECENT_S:
            self._recent.popitem(last=False)
        if name in self._recent:
            with os_errors(f"opening {name}"):
                return open_object(self._store.root, name)
        opened = await self._store.open_object(name)
        if opened is not None and len(self._recent) < _MAX_RECENT:
            self._recent[name] = now_s
            self._recent.move_to_end(name)
        return opened
