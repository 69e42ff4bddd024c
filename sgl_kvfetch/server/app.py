"""The server's application: routes, middlewares, and the handlers of lookups and ``/healthz``."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sgl_kvfetch.directory import FrontStore, LocalStore, StoreUsage
from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, split_hashes
from sgl_kvfetch.server.bodies import ACCOUNT, BodyReader, Budget, error_answer, json_answer, store_error_answer
from sgl_kvfetch.server.config import ServerConfig, is_loopback
from sgl_kvfetch.server.metrics import OTHER_ROUTE, ServerMetrics, cause_of
from sgl_kvfetch.server.objects import ObjectHandlers
from sgl_kvfetch.server.tokens import PUBLIC_PATHS, TokenFile, Tokens, authorised
from sgl_kvfetch.server.web import PageHandlers
from sgl_kvfetch.stores import NOTE_KINDS
from sgl_kvfetch.stores.wire import MAX_LOOKUP_REQUEST_BYTES, MSGPACK_TYPE, Folders, LookupRequest, Route

logger = logging.getLogger(__name__)

TOKENS = web.AppKey("tokens", Tokens)
METRICS = web.AppKey("metrics", ServerMetrics)
STORE = web.AppKey("store", LocalStore)
_PREPARED = web.RequestKey("prepared", bool)  # status and headers are sent
_ADDRESS = re.compile(r"(?i:localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?")  # no other name ends in digits
_HASHES_TIMES = 6  # memory for page hashes, in sizes of the body that has them
_HEALTH_AGE_S = 1.0  # an answer may be this old: anybody may ask, as often as they like


def create_app(config: ServerConfig) -> web.Application:
    """Create the application that serves ``config.root``. It owns its store, and closes it on clean-up.

    Raises ConfigError if the token file cannot be read or is malformed.
    """
    tokens = config.read_tokens()
    metrics = ServerMetrics(config.capacity_bytes)
    store = _open(config, metrics)
    bodies = BodyReader(metrics, config.idle_timeout_s)
    objects = ObjectHandlers(store, bodies, metrics, config)
    lookup = LookupHandler(store, bodies, metrics)
    health = Health(store, metrics)
    pages = PageHandlers(store, bodies, metrics, config)

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        metrics.record_usage(await store.usage())
        if isinstance(store, FrontStore):
            metrics.record_upstream(store.passed_bytes, store.kept_bytes)
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def run_store(app: web.Application) -> AsyncIterator[None]:
        try:
            store.own()
        except StoreError as e:
            raise ConfigError(str(e)) from e
        await pages.begin_history()  # which opens the catalog; the server listens only after this
        tasks = [
            asyncio.create_task(_collect(store, config.orphan_age_s)),
            asyncio.create_task(pages.keep_history()),
        ]
        if isinstance(tokens, TokenFile):
            tasks.append(asyncio.create_task(tokens.files.watch()))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()

    guards = () if config.has_token or not is_loopback(config.host) else (_known_host, _own_page)
    app = web.Application(middlewares=[_measured(metrics), _answered(metrics, Budget()), *guards, authorised(tokens)])
    app[TOKENS] = tokens
    app[METRICS] = metrics
    app[STORE] = store
    app.cleanup_ctx.append(run_store)
    app.on_response_prepare.append(_record_prepared)
    notes = f"{Route.NOTES}/{{kind:{'|'.join(NOTE_KINDS)}}}"
    one_note = notes + "/{name:.+}"
    one_object = Route.OBJECTS + "/{name:.+}"
    app.add_routes(
        [
            web.get(Route.HEALTH, health.get),
            web.get(Route.METRICS, show_metrics),
            web.get(Route.OBJECTS, objects.list, allow_head=False),
            web.delete(Route.OBJECTS, objects.delete_prefix),
            web.get(one_object, objects.get, allow_head=False),
            web.head(one_object, objects.head),
            web.put(one_object, objects.put),
            web.delete(one_object, objects.delete),
            web.post(Route.LOOKUP, lookup.post),
            web.get(notes, objects.list_notes, allow_head=False),
            web.get(one_note, objects.get_note, allow_head=False),
            web.put(one_note, objects.put_note),
            web.delete(one_note, objects.delete_note),
            web.post(Route.CHECK + "/{name:.+}", objects.check),
            *pages.routes(),
            web.get(Route.FOLDERS, lookup.folders, allow_head=False),
            web.get(Route.FOLDERS + "/{digest:[0-9a-f]{32}}", lookup.folders, allow_head=False),
        ]
    )
    return app


def _open(config: ServerConfig, metrics: ServerMetrics) -> LocalStore:
    """Open the store. Raises ConfigError, also for an upstream that cannot be one."""
    options: dict[str, Any] = {
        "capacity_bytes": config.capacity_bytes,
        "drop_levels": config.drop_levels,
        "orphan_age_s": config.orphan_age_s,
    }
    upstream = config.open_upstream(metrics.record_certificates)
    if upstream is None:
        return LocalStore(config.root, **options)
    return FrontStore(config.root, upstream, metrics.record_upstream_failure, **options)


async def _collect(store: LocalStore, every_s: float) -> None:
    """Remove orphans periodically, so that a store without writes is cleaned up too."""
    while True:
        try:
            await store.collect()
        except StoreError as e:
            logger.warning("cannot collect orphans: %s", e)
        await asyncio.sleep(every_s)


def _measured(metrics: ServerMetrics) -> Middleware:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else OTHER_ROUTE
        started = time.monotonic()
        status, num_sent = "aborted", 0
        with metrics.in_flight(route):
            try:
                response = await handler(request)
                status, num_sent = str(response.status), response.content_length or 0
                return response
            finally:
                metrics.answered(request, route, status, time.monotonic() - started, num_sent)

    return measure


async def _record_prepared(request: web.BaseRequest, response: web.StreamResponse) -> None:
    request[_PREPARED] = True


def _answered(metrics: ServerMetrics, budget: Budget) -> Middleware:
    """Make the middleware that gives each request an account of the budget, until its answer is sent.

    It turns errors into answers, and notes failures: their causes are counted and logged once, here.
    """

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request within its share of memory. Exceptions become answers, and the server's own are logged and
        counted."""
        what = f"{request.method} {request.path}"
        with budget.account() as account:
            request[ACCOUNT] = account
            try:
                response = await handler(request)
                if isinstance(response, web.Response) and isinstance(response.body, bytes):
                    account.take(len(response.body))
                    await response.prepare(request)
                    await response.write_eof()
                return response
            except web.HTTPException as e:
                word = "range" if e.status == 416 else e.reason.lower().replace(" ", "_")
                if e.status >= 500:
                    metrics.record_failure(what, getattr(e, "cause", word), e.text or e.reason, request.remote)
                failed = error_answer(e.status, word, e.text or e.reason)
                for header in ("Allow", "Retry-After", "Connection", "Content-Range"):
                    if header in e.headers:
                        failed.headers[header] = e.headers[header]
                return failed
            except web.RequestPayloadError:
                return error_answer(400, "bad_request", "the body is malformed")
            except ConnectionError:
                raise  # the client has disconnected
            except Exception as e:
                cut_short = request.get(_PREPARED)
                if isinstance(e, StoreError):
                    failed = store_error_answer(request.method, e)
                    if failed.status >= 500 or cut_short:
                        metrics.record_failure(what, cause_of(e), str(e), request.remote)
                else:
                    failed = error_answer(500, "server", "internal error")
                    logger.exception("%s %r failed", request.method, request.path)
                    metrics.count_failure(what, cause_of(e), "a bug: the log has a traceback", request.remote)
                if not cut_short:
                    return failed
                # The status is already sent. Only an aborted connection tells the client that the body is incomplete.
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError("failed while sending the body") from e

    return answer


@web.middleware
async def _known_host(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse names but ``localhost``: a web page can have its own name resolved to this machine, and read answers."""
    host = request.headers.get("Host", "localhost")
    if _ADDRESS.fullmatch(host) is None:
        raise web.HTTPMisdirectedRequest(
            text=f"a store without tokens was called {host[:100]!r}; call it localhost or by its address"
        )
    return await handler(request)


@web.middleware
async def _own_page(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse requests of other sites' pages, which a browser on this machine sends for them: no token would stop them.

    Browsers say themselves which site a request comes from. The page itself may be opened from anywhere.
    """
    site = request.headers.get("Sec-Fetch-Site", "none")
    if site not in ("none", "same-origin") and request.path not in PUBLIC_PATHS:
        raise web.HTTPForbidden(text=f"a store without tokens answers only its web UI; this came from {site[:20]!r}")
    return await handler(request)


class LookupHandler:
    def __init__(self, store: LocalStore, bodies: BodyReader, metrics: ServerMetrics) -> None:
        self._store = store
        self._bodies = bodies
        self._metrics = metrics

    async def post(self, request: web.Request) -> web.StreamResponse:
        body = await self._bodies.read_body(request, MAX_LOOKUP_REQUEST_BYTES, _HASHES_TIMES)
        try:
            asked = msgspec.msgpack.decode(body, type=LookupRequest)
        except DECODE_ERRORS as e:
            raise web.HTTPBadRequest(text=f"malformed lookup: {e}") from e
        if len(asked.page_hashes) % PAGE_HASH_BYTES:
            raise web.HTTPBadRequest(text=f"page_hashes has {len(asked.page_hashes)} bytes; expected a multiple of 32")
        page_hashes = split_hashes(asked.page_hashes)
        found = await self._store.lookup_taking(asked.namespace, page_hashes, request[ACCOUNT].take)
        self._metrics.record_lookup(asked.namespace, len(page_hashes), found.num_pages)
        answer = msgspec.msgpack.encode(found.hits)
        self._metrics.sent_bytes.inc(len(answer))
        return web.Response(body=answer, content_type=MSGPACK_TYPE)

    async def folders(self, request: web.Request) -> web.StreamResponse:
        found = await self._store.folders(request.match_info.get("digest", ""))
        return json_answer(Folders(sorted(found)))


class Health:
    def __init__(self, store: LocalStore, metrics: ServerMetrics) -> None:
        self._store = store
        self._metrics = metrics
        self._usage: StoreUsage | None = None
        self._known_until_s = 0.0
        self._asking = asyncio.Lock()

    async def get(self, request: web.Request) -> web.StreamResponse:
        """Answer 200 while the store can be read; ``write_problem`` says why nothing can be written, or is null.

        With the query ``?write``, answer 503 if nothing can be written.
        """
        loop = asyncio.get_running_loop()
        async with self._asking:
            if self._usage is None or loop.time() > self._known_until_s:
                self._usage = await self._store.usage()
                self._known_until_s = loop.time() + _HEALTH_AGE_S
        problem = self._usage.write_problem
        body = {"status": "ok" if problem is None else "read_only", "write_problem": problem}
        if problem is None or "write" not in request.query:
            return json_answer(body)
        self._metrics.record_failure(f"GET {request.path}", "write_problem", problem, request.remote)
        return json_answer(body, 503)
