"""The page that a store shows in a browser, and what it reads from the store."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import time
from collections import deque
from importlib.resources import files
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from sgl_kvfetch import __version__
from sgl_kvfetch.codec import NO_KEYS, Manifest, decode_manifest
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.directory.local import FolderUsage
from sgl_kvfetch.errors import DECODE_ERRORS, FormatError, KVFetchError
from sgl_kvfetch.keys import MANIFEST_SUFFIX, Namespace
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.server.bodies import BodyReader, json_answer
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.metrics import AnswerTimes, Client, Failure, ServerMetrics
from sgl_kvfetch.server.tokens import ROLE
from sgl_kvfetch.status import MAX_AUDITS_BYTES, Audits
from sgl_kvfetch.stores import (
    ProfileRow,
    is_namespace,
    list_profiles,
    profile_rows,
)
from sgl_kvfetch.stores.wire import PAGE_PATHS, Route
from sgl_kvfetch.types import first_to_last

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)


_EVERY_S = 10.0  # between two samples of the history
_SAMPLES = 360  # an hour
_SUMMARY_AGE_S = 2.0  # an answer may be this old
_SEGMENTS_AGE_S = 5.0
_MOST_LISTED = 64
_FOLDERS_AGE_S = 30.0  # its list of folders may be this old: making it reads the whole catalog
_MOST_FOLDERS = 1000  # in an answer
_MOST_NAME_CHARS = 200
_MOST_TOLD = 64  # servers of a folder whose audits are shown
_AUDITS_TIMES = 4  # memory for what audits found, in sizes of its body
_LIMIT = 50  # segments in an answer
_PREFIX = re.compile("[0-9]{0,8}(-[0-9a-f]{0,64})?")
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class LoadSample(msgspec.Struct, frozen=True):
    """The counters and gauges of /metrics at a time, in seconds since the epoch."""

    at_s: float
    values: dict[str, float]


class ToldAudits(msgspec.Struct, frozen=True):
    """What a server told of its audits. ``says``, ``advice``: for people; ``advice`` is "" if nothing is to be done."""

    client: str
    told_s: float
    audits: Audits
    says: str
    advice: str


class FolderRow(msgspec.Struct, frozen=True):
    """A folder of the store: what one rank has of a model. The names are empty if no manifest could be read."""

    folder: str
    model: str  # for people, as is `quantiser`
    quantiser: str
    model_identity: str
    quantiser_identity: str
    cache: str  # what else distinguishes the model's namespaces
    num_segments: int
    num_tokens: int
    raw_bytes: int
    stored_bytes: int
    first_used_s: float
    last_used_s: float
    found_tokens: int = 0  # by all lookups since this process started
    audits: tuple[ToldAudits, ...] = ()  # of servers that read it since this process started


class Summary(msgspec.Struct, frozen=True):
    """What the page shows. All who ask share it; the header ``KVFetch-Role`` says what their own token permits."""

    now_s: float
    host: str  # as the machine calls itself
    directory: str
    version: str
    started_s: float
    capacity_bytes: int | None
    write_problem: str | None
    disk_bytes: int
    disk_free_bytes: int
    failures: list[Failure]  # the last ones, the oldest first
    folders: list[FolderRow]
    profiles: list[ProfileRow]  # the newest first
    clients: list[Client]  # the one that asked last is the first
    history: list[LoadSample]
    answer_times: dict[str, AnswerTimes]  # of ``history``, by kind: lookup, read, write


class _Kind(NamedTuple):
    """What all segments of a folder have in common, but for their labels."""

    names: tuple[str, str, str, str] = ("", "", "", "")  # model, quantiser, and their identities
    cache: str = ""
    page_size: int = 0
    page_bytes: int = 0


_UNKNOWN = _Kind()


class PageHandlers:
    def __init__(self, store: LocalStore, bodies: BodyReader, metrics: ServerMetrics, config: ServerConfig) -> None:
        """``metrics``: what the page shows of the store's work, and samples for its charts."""
        self._store = store
        self._bodies = bodies
        self._metrics = metrics
        self._config = config
        self._history: deque[LoadSample] = deque(maxlen=_SAMPLES)
        self._times: deque[dict[str, list[float]]] = deque(maxlen=_SAMPLES)  # answers by time, at each sample
        self._kinds: dict[str, _Kind] = {}  # by folder
        self._folders: list[FolderRow] = []
        self._folders_until_s = 0.0
        self._audits: dict[str, dict[str, ToldAudits]] = {}  # by folder and client
        self._profiles: list[ProfileRow] = []
        self._summary = b""
        self._summary_until_s = 0.0
        self._asking = asyncio.Lock()
        self._listed: dict[str, tuple[float, bytes]] = {}  # by folder and prefix: when, and the answer
        self._listing = asyncio.Lock()

    def routes(self) -> list[web.RouteDef]:
        names = {path: path[1:] or "page.html" for path in PAGE_PATHS}
        one_segment = "/{name:.+}"
        return [
            *(web.get(path, self._file(name)) for path, name in names.items()),
            web.get(Route.SUMMARY, self.summary, allow_head=False),
            web.get(Route.SEGMENTS, self.segments, allow_head=False),
            web.get(Route.SEGMENTS + one_segment, self.segment, allow_head=False),
            web.put(Route.AUDITS + "/{folder}", self.put_audits),
        ]

    def _file(self, name: str) -> Any:
        body = (files("sgl_kvfetch.server") / "page" / name).read_bytes()
        if self._config.has_token:
            body = body.replace(b'<form id="login" hidden>', b'<form id="login">')
        kind = _KINDS[Path(name).suffix]

        async def get(request: web.Request) -> web.StreamResponse:
            return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)

        return get

    async def begin_history(self) -> None:
        """Take the first sample, before anybody asks."""
        await self._sample()

    async def keep_history(self) -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            await self._sample()

    def _now(self) -> LoadSample:
        return LoadSample(time.time(), self._metrics.activity())

    async def _sample(self) -> None:
        try:
            self._metrics.record_usage(await self._store.usage())
        except Exception as e:  # the next time it may do
            _limited.warning("sample", f"cannot sample what the store does: {brief(e)}")
            return
        self._history.append(self._now())
        self._times.append(self._metrics.answers_by_time())

    async def summary(self, request: web.Request) -> web.StreamResponse:
        """Answer what the page shows at its top. Folders and usage are asked for again only once they are old."""
        loop = asyncio.get_running_loop()
        async with self._asking:
            if loop.time() > self._folders_until_s:
                usages = await self._store.folder_usages(_MOST_FOLDERS)
                self._folders = [row for each in usages if (row := await self._row(each)) is not None]
                self._profiles = profile_rows(await list_profiles(self._store), NO_KEYS)
                self._audits = {each.folder: self._audits.get(each.folder, {}) for each in usages}
                self._kinds = {each.folder: self._kinds.get(each.folder, _UNKNOWN) for each in usages}
                self._folders_until_s = loop.time() + _FOLDERS_AGE_S
            if loop.time() > self._summary_until_s:
                usage = await self._store.usage()
                self._metrics.record_usage(usage)
                summary = Summary(
                    time.time(),
                    socket.gethostname(),
                    str(self._config.root.absolute()),
                    __version__,
                    self._metrics.started_s,
                    self._config.capacity_bytes,
                    usage.write_problem,
                    usage.disk_bytes,
                    usage.disk_free_bytes,
                    list(self._metrics.last_failures),
                    [self._with_servers(row) for row in self._folders],
                    self._profiles,
                    self._metrics.clients,
                    [*self._history, self._now()],
                    self._metrics.answer_times(self._times[0] if self._times else {}),
                )
                self._summary = msgspec.json.encode(summary)
                self._summary_until_s = loop.time() + _SUMMARY_AGE_S
        headers = {"KVFetch-Role": request[ROLE].name.lower()}
        return web.Response(body=self._summary, content_type="application/json", headers=headers)

    async def put_audits(self, request: web.Request) -> web.StreamResponse:
        """Keep what a server's audits of a folder have found, instead of what it told before."""
        folder = request.match_info["folder"]
        body = await self._bodies.read_body(request, MAX_AUDITS_BYTES, _AUDITS_TIMES)
        if not is_namespace(folder) or folder not in await self._store.folders(folder.partition(".")[0]):
            raise web.HTTPNotFound(text=f"no folder {folder[:60]!r}")
        try:
            audits = msgspec.json.decode(body, type=Audits)
        except DECODE_ERRORS as e:
            raise web.HTTPBadRequest(text=f"what audits found is malformed: {e}") from e
        told = self._audits.setdefault(folder, {})
        client = request.remote or ""
        told.pop(client, None)
        told[client] = ToldAudits(client, time.time(), audits, audits.says, audits.advice)
        if len(told) > _MOST_TOLD:
            del told[next(iter(told))]
        return web.Response(status=204)

    def _with_servers(self, row: FolderRow) -> FolderRow:
        """Add what servers have found in a folder."""
        found = self._metrics.found_pages.get(row.folder, 0) * self._kinds.get(row.folder, _UNKNOWN).page_size
        told = self._audits.get(row.folder, {})
        return msgspec.structs.replace(row, found_tokens=found, audits=tuple(told.values()))

    async def _row(self, usage: FolderUsage) -> FolderRow | None:
        """Return None if the files of a folder are gone, which the catalog does not know yet: as on a full disk."""
        kind = await self._kind(usage)
        if kind is None:
            return None
        return FolderRow(
            usage.folder,
            *kind.names,
            kind.cache,
            usage.num_segments,
            usage.num_pages * kind.page_size,
            usage.num_pages * kind.page_bytes,
            usage.stored_bytes,
            usage.first_used_s,
            usage.last_used_s,
        )

    async def _kind(self, usage: FolderUsage) -> _Kind | None:
        """Return what a folder's segments have in common. One that cannot be read or shown costs its own row.

        None if the manifest is gone; the catalog is corrected then, so that the next time another one is read.
        """
        if (known := self._kinds.get(usage.folder, _UNKNOWN)) is not _UNKNOWN:
            return known
        try:
            content = await self._store.peek(usage.some_manifest)
            if content is None:
                self._store.look_again(usage.some_manifest)
                return None
            manifest = await asyncio.to_thread(decode_manifest, content)
            namespace = manifest.namespace
            kind = _Kind(_names(manifest), _cache(namespace), namespace.page_size, manifest.geometry.page_bytes)
        except KVFetchError as e:
            _limited.warning("folder", f"cannot show the folder {usage.folder}: {e}")
            return _UNKNOWN
        except Exception:  # a writer's text that nobody thought of must not hide the other folders
            logger.exception("cannot show the folder %s", usage.folder)
            return _UNKNOWN
        self._kinds[usage.folder] = kind
        return kind

    async def segments(self, request: web.Request) -> web.StreamResponse:
        """List the last used segments of a folder. All who ask share an answer: it reads all of the folder's rows."""
        folder = request.query.get("folder", "")
        if not is_namespace(folder):
            raise web.HTTPBadRequest(text=f"folder is {folder[:60]!r}; expected the name of a namespace's folder")
        prefix = request.query.get("prefix", "")
        if not _PREFIX.fullmatch(prefix):
            raise web.HTTPBadRequest(text=f"prefix is {prefix[:60]!r}; expected the start of a segment's name: 8-91ab")
        key = f"{folder}/{prefix}"
        async with self._listing:
            at_s, body = self._listed.pop(key, (-inf, b""))
            if at_s < (now_s := asyncio.get_running_loop().time()) - _SEGMENTS_AGE_S:
                at_s, body = now_s, msgspec.json.encode(await self._store.segment_usages(folder, _LIMIT, prefix))
            self._listed[key] = at_s, body
            if len(self._listed) > _MOST_LISTED:
                del self._listed[next(iter(self._listed))]
        return web.Response(body=body, content_type="application/json")

    async def segment(self, request: web.Request) -> web.StreamResponse:
        """Show a manifest, without its tables."""
        name = request.match_info["name"]
        content = await self._store.peek(name) if name.endswith(MANIFEST_SUFFIX) else None
        if content is None:
            raise web.HTTPNotFound(text=f"no segment {name}")
        try:
            manifest = await asyncio.to_thread(decode_manifest, content)
        except FormatError as e:
            raise web.HTTPUnprocessableEntity(text=f"{name} is damaged: {e}") from e
        namespace, (model, quantiser, model_identity, quantiser_identity) = manifest.namespace, _names(manifest)
        about = {
            "name": manifest.key.manifest_name,
            "model": model,
            "quantiser": quantiser,
            "model_identity": model_identity,
            "quantiser_identity": quantiser_identity,
            "kv_dtype": namespace.kv_dtype,
            "page_size": namespace.page_size,
            "first_token": manifest.first_page * namespace.page_size,
            "num_tokens": manifest.num_pages * namespace.page_size,
            "layers": [namespace.first_layer, namespace.first_layer + namespace.num_layers],
            "heads": [manifest.first_head, manifest.first_head + manifest.num_heads],
            "raw_bytes": manifest.raw_bytes,
            "expires_s": manifest.expires,
            "codings": [
                {"codecs": each.codecs, "resolution": each.resolution, "stored_bytes": each.size_bytes}
                for each in manifest.codings
            ],
            "side_pools": sorted({page.pool for side in manifest.sides for page in side.pages}),
        }
        return json_answer(about)


def _names(manifest: Manifest) -> tuple[str, str, str, str]:
    """Return the names of a segment's model and quantiser for people, and their identities."""
    (model, quantiser), labels = (manifest.namespace.model, manifest.namespace.quantiser), manifest.labels
    names = labels.model_name(model), labels.quantiser_name(quantiser), model, quantiser
    return tuple(name[:_MOST_NAME_CHARS] for name in names)  # type: ignore[return-value]


def _cache(namespace: Namespace) -> str:
    """Return what tells a namespace from others of its model and quantiser: dtypes, pages, layers, flags."""
    layers = first_to_last(namespace.first_layer, namespace.first_layer + namespace.num_layers)
    parts = [namespace.kv_dtype, f"pages of {namespace.page_size}", f"layers {layers}"]
    for part in namespace.model_dtype.split(";"):
        name, _, value = part.partition("=")
        text = f"{name} {value}".strip()
        if value != "None" and text not in (namespace.kv_dtype, f"dtype {namespace.kv_dtype}"):
            parts.append(text)
    return ", ".join(parts)[:_MOST_NAME_CHARS]
