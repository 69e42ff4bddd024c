"""The server's application: routes and middlewares."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server.access import authorised
from sgl_kvfetch.server.answers import error_answer, store_error_answer
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.handlers import Health, LookupHandler, PinHandlers
from sgl_kvfetch.server.metrics import ServerMetrics
from sgl_kvfetch.server.objects import ObjectHandlers
from sgl_kvfetch.server.pages import PageHandlers
from sgl_kvfetch.server.tokens import TokenFile, Tokens
from sgl_kvfetch.stores import (
    CHECK_PATH,
    FOLDERS_PATH,
    HEALTH_PATH,
    LOOKUP_PATH,
    MAX_LOOKUP_REQUEST_BYTES,
    METRICS_PATH,
    OBJECTS_PATH,
    PINS_PATH,
)

logger = logging.getLogger(__name__)

TOKENS = web.AppKey("tokens", Tokens)
_PREPARED = web.RequestKey("prepared", bool)  # status and headers are sent
_LOOK_AT_TOKENS_S = 1.0


def create_app(config: ServerConfig) -> web.Application:
    """Create the application that serves ``config.root``. It owns its store, and closes it on clean-up.

    Raises ConfigError if the token file cannot be read or is malformed.
    """
    tokens = config.read_tokens()
    metrics = ServerMetrics(config.capacity_bytes)
    store = LocalStore(config.root, capacity_bytes=config.capacity_bytes, orphan_age_s=config.orphan_age_s)
    objects = ObjectHandlers(store, metrics, config)
    lookup = LookupHandler(store, metrics, config)
    pins = PinHandlers(store, config)
    health = Health(store)
    pages = PageHandlers(store, metrics, config)

    async def show_metrics(request: web.Request) -> web.StreamResponse:
        metrics.note_usage(await store.usage())
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def run_store(app: web.Application) -> AsyncIterator[None]:
        await _warm_up(store)  # the server listens only after this
        tasks = [
            asyncio.create_task(_collect(store, config.orphan_age_s)),
            asyncio.create_task(pages.keep_history()),
        ]
        if isinstance(tokens, TokenFile):
            tasks.append(asyncio.create_task(_follow(tokens)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await store.close()

    app = web.Application(
        middlewares=[_measured(metrics), _errors_as_json, authorised(tokens)],
        client_max_size=MAX_LOOKUP_REQUEST_BYTES,
    )
    app[TOKENS] = tokens
    app.cleanup_ctx.append(run_store)
    app.on_response_prepare.append(_note_prepared)
    one_pin = PINS_PATH + "/{name}"
    one_object = OBJECTS_PATH + "/{name:.+}"
    app.add_routes(
        [
            web.get(HEALTH_PATH, health.get),
            web.get(METRICS_PATH, show_metrics),
            web.get(OBJECTS_PATH, objects.list, allow_head=False),
            web.delete(OBJECTS_PATH, objects.delete_prefix),
            web.get(one_object, objects.get, allow_head=False),
            web.head(one_object, objects.head),
            web.put(one_object, objects.put),
            web.delete(one_object, objects.delete),
            web.post(LOOKUP_PATH, lookup.post),
            web.get(PINS_PATH, pins.list, allow_head=False),
            web.get(one_pin, pins.get, allow_head=False),
            web.put(one_pin, pins.put),
            web.delete(one_pin, pins.delete),
            web.post(CHECK_PATH + "/{name:.+}", objects.check),
            *pages.routes(),
            web.get(FOLDERS_PATH, lookup.folders, allow_head=False),
            web.get(FOLDERS_PATH + "/{digest:[0-9a-f]{32}}", lookup.folders, allow_head=False),
        ]
    )
    return app


async def _warm_up(store: LocalStore) -> None:
    started = time.monotonic()
    try:
        num_segments = await store.warm_up()
    except StoreError as e:
        logger.warning("cannot read the stored segments at start: %s", e)
        return
    logger.debug("found %d segments in %.1f s", num_segments, time.monotonic() - started)


async def _collect(store: LocalStore, every_s: float) -> None:
    """Remove orphans periodically, so that a store without writes is cleaned up too."""
    while True:
        try:
            await store.collect()
        except StoreError as e:
            logger.warning("cannot collect orphans: %s", e)
        await asyncio.sleep(every_s)


async def _follow(tokens: TokenFile) -> None:
    while True:
        await asyncio.sleep(_LOOK_AT_TOKENS_S)
        await asyncio.to_thread(tokens.reload, if_changed=True)


def _measured(metrics: ServerMetrics) -> Middleware:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "other"  # unknown paths must not become labels
        started = time.monotonic()
        status = "aborted"
        with metrics.in_flight.track_inprogress():
            try:
                response = await handler(request)
                status = str(response.status)
                return response
            finally:
                method = request.method if resource is not None else "other"
                metrics.requests.labels(method, route, status).inc()
                metrics.seconds.labels(method, route).observe(time.monotonic() - started)

    return measure


async def _note_prepared(request: web.BaseRequest, response: web.StreamResponse) -> None:
    request[_PREPARED] = True


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as e:
        answer = error_answer(e.status, e.reason.lower().replace(" ", "_"), e.text or e.reason)
        for header in ("Allow", "Retry-After", "Connection"):
            if header in e.headers:
                answer.headers[header] = e.headers[header]
        return answer
    except web.RequestPayloadError:
        return error_answer(400, "bad_request", "the body is malformed")
    except ConnectionError:
        raise  # the client has disconnected
    except Exception as e:
        if not isinstance(e, StoreError):
            logger.exception("%s %r failed", request.method, request.path)
        if request.get(_PREPARED):
            # The status is already sent. Only an aborted connection tells the client that the body is incomplete.
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("failed while sending the body") from e
        return store_error_answer(e) if isinstance(e, StoreError) else error_answer(500, "server", "internal error")
