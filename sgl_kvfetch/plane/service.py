"""The data plane's side, from its start to its end: carries out the engine's commands, on one event loop.

Commands come in order, and each begins a task: `Service.serve` never waits, so a slow store delays no other command.
The engine may cancel anything at any moment, or be gone, which closes the socket. So

* **each piece of work is answered once**, in a ``finally``: `Found`, `Fetched`, `Staged`, `ClearOver`.
  The engine waits for these, and frees pages by them. Pages to be written are `Settled` once, and their memory `Taken`;
* **no error crosses to the engine.** It is counted as a miss, by its reason, where it happens (`metrics.counted`). The
  engine computes what it does not get, and needs no reason;
* **a cancelled task ends like any other.** It is cancelled from the loop, and not at once: a task that is cancelled
  before its first step would not run its ``finally``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Callable
from functools import partial

import msgspec

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec.bitstream.nvdec import open_nvdec_alone
from sgl_kvfetch.errors import FormatError, KVFetchError, StoreError
from sgl_kvfetch.keys import MAX_LABEL_CHARS, HeadSlice, split_hashes, valid_unicode
from sgl_kvfetch.plane.audit import Auditor, AuditRecord, record_file
from sgl_kvfetch.plane.calibration.finder import ProfileFinder
from sgl_kvfetch.plane.calibration.own import delete_old
from sgl_kvfetch.plane.coded import CODEC
from sgl_kvfetch.plane.fetch.finder import StoredPrompts
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plane.prefetching import Prefetcher
from sgl_kvfetch.plane.profiles import answer
from sgl_kvfetch.plane.staging import Stager
from sgl_kvfetch.plane.store import StoreClient, open_client
from sgl_kvfetch.plane.write.gather import taken_batch
from sgl_kvfetch.protocol import Emit, KVFetchConfig, Line, Room, config_quantiser, messages as m
from sgl_kvfetch.protocol.arena import map_pool
from sgl_kvfetch.protocol.messages import Outbox
from sgl_kvfetch.side_by_side import call_soon
from sgl_kvfetch.status import Audits
from sgl_kvfetch.types import KVGeometry

logger = logging.getLogger(__name__)

_CLOSE_S = 3.0  # how long each step of closing may take
_CLEAR_S = 5.0
_TELL_S = 30.0  # between two times that the store is told of audits


class Service:
    """Serves one engine until it is told to close."""

    def __init__(self, start: m.Start, line: Line, emit: Emit, emit_staged: Emit) -> None:
        """Open the store. ``emit`` may be called on any thread. ``emit_staged`` sends what the engine's steps look for.
        Raises KVFetchError."""
        config, heads, client = _open(start, line)
        self.client = client
        self._room = room = Room(line.values.num_bytes - config.memory_cache)  # behind it lies the cache
        self._heads = heads
        self._geometry: KVGeometry = heads.geometry
        self._start = start
        self._emit = emit
        self._quantiser = client.writer.quantiser
        self._written = line.pages  # where the engine puts pages that are to be written
        self._told_s, self._is_off = -math.inf, False
        self._record = record_file(config.store, heads)
        namespace, labels = heads.namespace, heads.labels
        names = labels.model_name(namespace.model), labels.quantiser_name(namespace.quantiser)
        self._auditor = Auditor(
            config.audit_share if config.writes else 0.0,
            heads,
            client,
            self._record,
            cuts=start.rank == 0,
            record=AuditRecord(config.store, *names, namespace.quantiser),
            on_audit=self._tell_audits,
        )
        self._prompts = StoredPrompts(config, heads, client, line.values, room, start.sides, self._auditor.served)
        self._tasks = self._prompts.tasks
        if self._auditor.is_over or self._auditor.record.parts:
            self._tell_audits()
        self._stager = Stager(self._prompts, emit_staged, takes_code=start.takes_code)
        pool = map_pool(line.pool, start.pool, heads.geometry.torch_dtype)
        self._prefetcher = Prefetcher(self._prompts, emit, pool)
        self._finder = None if start.watch is None else ProfileFinder(config, start.watch, emit)
        client.writer.on_known = self._auditor.known
        client.writer.on_settled = lambda num_pages, is_lost: emit(m.Settled(num_pages, is_lost))
        self._loop = asyncio.get_running_loop()
        self._tasks.begin(asyncio.to_thread(delete_old))

    def serve(self, command: m.Command) -> None:
        """Begin to carry out a command. Never waits."""
        if isinstance(command, m.Stage | m.FetchPages) and command.is_idle:
            self._prompts.order.engine.clear()
        match command:
            case m.LookUp():
                self._prefetcher.look_up(command)
            case m.Stage():
                self._stager.begin(command)
            case m.FetchPages() | m.FetchSide():
                self._prefetcher.fetch(command)
            case m.Unstage():
                if not self._stager.release(command):
                    self._prefetcher.release(command.work)
            case m.Flush():
                self.client.reads.drop_unused()
            case m.Write():
                self._write(command)
            case m.Clear():
                self._tasks.begin(self._clear(command))
            case m.ShowPrompts() | m.PauseCalibration():
                if self._finder is not None:
                    self._finder.serve(command)
            case m.Ping():
                self._emit(m.Pong())
            case m.TakeProfile() | m.Start() | m.Close():
                raise AssertionError(f"a running service does not accept {command}")

    def _tell_audits(self) -> None:
        """Tell the engine, and now and then the store's page, what audits have found. If they have failed, now or
        before this start, read and write nothing until they are sound again."""
        record = self._auditor.record
        audits, now_s, was_off = record.summary(), time.monotonic(), self._is_off
        self._is_off = self._auditor.is_over
        self.client.finder.turn(is_on=not self._is_off or self._auditor.is_trying)
        self.client.writer.is_off = self._is_off
        self._emit(m.AuditsTold(audits))
        if self._is_off != was_off or now_s >= self._told_s + _TELL_S:
            self._told_s = now_s
            self._tasks.begin(self._tell_store(audits))
        if self._is_off and not was_off:
            logger.error(
                "kvfetch: audits have failed, so nothing is read or written, all is recomputed: %s. If weights have "
                "changed, attach with a new model_id. Else kvfetch calibrate --publish with prompts like yours, or "
                "quantiser exact. It is tried again after %s; to try again now, delete %s and attach again. See "
                "docs/operations.md#audits",
                audits.off,
                time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.try_again_s)),
                self._record,
            )
        elif was_off and not self._is_off:
            logger.warning("kvfetch: audits pass again: the store is read and written as before")
        metrics.AUDITED_OFF.set(self._is_off)  # last: whoever sees it finds the line in the log

    async def _tell_store(self, audits: Audits) -> None:
        try:
            await self.client.store.tell_audits(self._heads.folder, audits)
        except StoreError as e:
            logger.debug("kvfetch: the store does not know what audits have found: %s", e)

    async def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and sockets."""
        self._room.close()
        await self._tasks.cancel()
        await self._auditor.close()
        if self._finder is not None:
            await self._finder.close()
        await self.client.close(_CLOSE_S)

    # Writes

    def _write(self, command: m.Write) -> None:
        """Queue pages. They are read from shared memory until they are encoded: then it is the engine's again."""
        hashes = split_hashes(command.hashes)
        try:
            # Not emitted at once: tensors end at any point of this program, also while a message is being sent.
            taken = partial(call_soon, self._loop, self._emit, m.Taken(command.work))
            batch = taken_batch(command, self._start, self._geometry, self._quantiser, self._written, taken)
            self._auditor.handed_over(batch)
            self.client.writer.add(batch)
        except Exception:
            logger.exception("kvfetch: taking pages for writing failed")
            self._emit(m.Settled(len(hashes)))

    async def _clear(self, command: m.Clear) -> None:
        fault = ""
        try:
            async with asyncio.timeout(_CLEAR_S):
                await self.client.clear(self._heads)
        except TimeoutError:
            fault = f"it took longer than {_CLEAR_S:g} s"
        except KVFetchError as e:
            fault = valid_unicode(str(e))
        finally:
            self._emit(m.ClearOver(command.work, fault))


async def run_data_plane(line: Line, on_service: Callable[[Service], None] = lambda service: None) -> None:
    """Serve until told to close, or until the engine is gone. ``on_service`` is called with the new service."""
    loop = asyncio.get_running_loop()
    outboxes = events, staged = _outbox(loop, line.commands), _outbox(loop, line.staged)
    emit = events.send
    commands: m.MessageReader[m.Command] = m.MessageReader(m.Command)
    service: Service | None = None
    try:
        while data := await loop.sock_recv(line.commands, 1 << 18):
            for command in commands.feed(data):
                match command:
                    case m.TakeProfile():
                        emit(await asyncio.to_thread(answer, command))
                    case m.Start():
                        service = Service(command, line, emit, staged.send)
                        on_service(service)
                        emit(m.Ready())
                    case m.Close():
                        return
                    case _:
                        assert service is not None, "only TakeProfile may come before Start"
                        service.serve(command)
    except KVFetchError as e:
        if service is None:
            emit(m.Refused.of(e))
        else:
            logger.error("kvfetch: the data plane does not understand the engine: %s", e)
    except ConnectionError as e:
        logger.error("kvfetch: the data plane lost its connection to the engine: %s", e)
    finally:
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


def _open(command: m.Start, line: Line) -> tuple[KVFetchConfig, HeadSlice, StoreClient]:
    """Open the store for ``Start``. Raises KVFetchError."""
    if command.version != m.VERSION:
        raise FormatError(f"expected message version {m.VERSION} from the engine, found {command.version}")
    timeline.start(f"{command.rank}.data")
    config = KVFetchConfig.model_validate(command.config)
    labels = msgspec.structs.replace(command.labels, writer=socket.gethostname()[:MAX_LABEL_CHARS])
    heads = HeadSlice(command.namespace, range(command.first_head, command.end_head), labels)
    # Behind what the engine takes from, in the same memory: a GPU may take what is there, too.
    memory = MemoryCache(line.values.buffer(0, line.values.num_bytes), config.memory_cache)
    nvdec = None
    if command.gpu is not None:
        nvdec, about = open_nvdec_alone(command.gpu)
        logger.info("kvfetch: %s", about)
    client = open_client(
        config,
        heads,
        config_quantiser(config),
        nvdec=nvdec,
        max_span_pages=command.most_span_pages,
        engine_codecs=(CODEC,) if command.takes_code else (),
        memory=memory,
    )
    return config, heads, client
