"""Runs a data plane from its start to its end: receives commands and sends events."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from functools import partial

from sgl_kvfetch import timeline
from sgl_kvfetch.errors import FormatError, KVFetchError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.arena import Room
from sgl_kvfetch.plane.channel import Outbox
from sgl_kvfetch.plane.client import StoreClient, open_client
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.launch import Line
from sgl_kvfetch.plane.quantiser import config_quantiser
from sgl_kvfetch.plane.service import GetDestination, Service, arena_destination, send_side_page

logger = logging.getLogger(__name__)

OpenClient = Callable[[KVFetchConfig, HeadSlice, m.Start], StoreClient]


async def run_data_plane(
    line: Line,
    open_: OpenClient,
    destination: GetDestination | None = None,
    on_service: Callable[[Service], None] = lambda service: None,
) -> None:
    """Serve until told to close, or until the engine is gone.

    ``open_`` opens the store. ``destination``: where pages go; by default, into the shared memory of ``line``.
    ``on_service`` is called with the new service.
    """
    loop = asyncio.get_running_loop()
    outboxes = for_steps, others = _outbox(loop, line.commands), _outbox(loop, line.events)
    has_steps = False

    def emit(event: m.Event) -> None:
        (for_steps if has_steps and isinstance(event, m.ForStep) else others).send(event)

    commands: m.MessageReader[m.Command] = m.MessageReader(m.Command)
    service: Service | None = None
    room = Room(line.values.num_bytes)
    in_arena = partial(arena_destination, line.values, room, emit)
    try:
        while data := await loop.sock_recv(line.commands, 1 << 18):
            for command in commands.feed(data):
                match command:
                    case m.Start():
                        has_steps = command.has_steps
                        client = _open(command, open_)
                        service = Service(
                            *client,
                            emit,
                            destination or in_arena,
                            room.free,
                            line.pages,
                            partial(send_side_page, line.values, room, emit),
                            command.sides,
                        )
                        on_service(service)
                        emit(m.Ready())
                    case m.Close():
                        return
                    case _:
                        assert service is not None, "the first command must be Start"
                        service.serve(command)
    except KVFetchError as e:
        if service is None:
            emit(m.Refused(type(e).__name__, str(e)))
        else:
            logger.error("kvfetch: the data plane does not understand the engine: %s", e)
    except ConnectionError as e:
        logger.error("kvfetch: the data plane lost its connection to the engine: %s", e)
    finally:
        room.close()
        if service is not None:
            await service.close()
        for outbox in outboxes:
            loop.remove_writer(outbox.sock)
            outbox.close()


def _outbox(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Outbox:
    """Return an outbox whose unsent bytes the loop sends."""

    def send_more() -> None:
        if outbox.flush():
            loop.remove_writer(sock)

    outbox = Outbox(sock, lambda: loop.call_soon_threadsafe(loop.add_writer, sock, send_more))
    return outbox


def _open(command: m.Start, open_: OpenClient) -> tuple[KVFetchConfig, HeadSlice, StoreClient]:
    """Open the store for ``Start``. Raises KVFetchError."""
    if command.version != m.VERSION:
        raise FormatError(f"expected message version {m.VERSION} from the engine, found {command.version}")
    timeline.start(f"{command.rank}.data")
    config = KVFetchConfig.model_validate(command.config)
    heads = HeadSlice(command.namespace, range(command.first_head, command.end_head), command.labels)
    return config, heads, open_(config, heads, command)


def open_on_cpu(config: KVFetchConfig, heads: HeadSlice, start: m.Start) -> StoreClient:
    """Open the store for a data plane that needs no GPU. Raises KVFetchError."""
    return open_client(config, heads, config_quantiser(config), max_span_pages=start.most_span_pages)
