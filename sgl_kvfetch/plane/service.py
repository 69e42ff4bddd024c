"""The data plane's side, from its start to its end: carries out the engine's commands, on one event loop.

Commands come in order, and each begins a task: `Service.serve` never waits, so a slow store delays no other command.
The engine may cancel anything at any moment, or be gone, which closes the socket. So

* **each piece of work is answered once**, in a ``finally``: `Found`, `FetchOver`, `SideOver`, `ClearOver`. The
  engine waits for these, and frees pages by them. Pages to be written are `Settled` once, and their memory `Taken`;
* **no error crosses to the engine.** It is counted as a miss, by its reason, where it happens (`client.counted`). The
  engine computes what it does not get, and needs no reason;
* **a cancelled task ends like any other.** It is cancelled from the loop, and not at once: a task that is cancelled
  before its first step would not run its ``finally``.

What a lookup found is kept until the engine says whether it will be fetched.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec.bitstream import open_nvdec_alone
from sgl_kvfetch.codec.container import Pages, QuantisedPages, RawPages
from sgl_kvfetch.errors import FormatError, KVFetchError
from sgl_kvfetch.keys import HeadSlice, split_hashes
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.arena import Emit, Room, arena_destination, pages_in, send_side_page, tensors_in
from sgl_kvfetch.plane.audit import Auditor, FailedAudits, keep_verdict, read_verdict, verdict_file
from sgl_kvfetch.plane.calibration.finder import ProfileFinder
from sgl_kvfetch.plane.channel import Outbox
from sgl_kvfetch.plane.client import StoreClient, count_fetch, count_miss, counted, open_client
from sgl_kvfetch.plane.coded import CODEC
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.fetch.fetcher import FetchResult
from sgl_kvfetch.plane.fetch.plan import PageSource
from sgl_kvfetch.plane.fetch.sides import KV_POOL, Usable, usable_runs
from sgl_kvfetch.plane.fetch.sink import Destination
from sgl_kvfetch.plane.launch import Line
from sgl_kvfetch.plane.memory_cache import MemoryCache
from sgl_kvfetch.plane.misses import miss, note, noted_here, shortfall
from sgl_kvfetch.plane.quantiser import config_quantiser
from sgl_kvfetch.plane.staging import Stager
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.types import KVGeometry

logger = logging.getLogger(__name__)

_MOST_FOUND = 1024  # lookups whose results are kept
_CLOSE_S = 3.0  # how long each step of closing may take
_CLEAR_S = 5.0

GetDestination = Callable[[int, int], Destination | None]
OpenClient = Callable[[KVFetchConfig, HeadSlice, m.Start, MemoryCache | None], StoreClient]


class Service:
    """Serves one engine until it is told to close."""

    def __init__(
        self,
        start: m.Start,
        config: KVFetchConfig,
        heads: HeadSlice,
        client: StoreClient,
        line: Line,
        room: Room,
        emit: Emit,
        destination: GetDestination | None,
    ) -> None:
        """``room`` allocates those bytes of ``line.values`` that are not the cache's. ``emit`` may be called on any
        thread. ``destination`` returns where the pages of a fetch go, from its number and how many they are; None if
        the engine has given it up. Without ``destination``, pages go into ``line.values``."""
        self.client = client
        self._config = config
        self._heads = heads
        self._geometry: KVGeometry = heads.geometry
        self._emit = emit
        self._destination: GetDestination = destination or partial(arena_destination, line.values, room, emit)
        self._room = room
        self._written = line.pages  # where the engine puts pages that are to be written
        self._send_side = partial(send_side_page, line.values, room, emit)
        self._sides = start.sides
        self._verdict = verdict_file(config.store, heads)
        self._auditor = Auditor(
            config.audit,
            heads,
            client.writer.quantiser,
            client.finder,
            client.fetcher,
            store=client.store,
            writes=config.writes,
            on_wrong=self._condemn,
        )
        if (verdict := read_verdict(self._verdict)) is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(verdict.at_s))
            self._turn_off(f"{verdict.why} (found on {at})")
        self._stager = Stager(
            config, heads, client, emit, line.values, room, takes_code=start.takes_code, audited=self._audited
        )
        self._finder = None if start.watch is None else ProfileFinder(config, start.watch, emit)
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._found: OrderedDict[int, list[PageSource]] = OrderedDict()
        self._tasks = Tasks()
        client.writer.on_known = self._auditor.known
        client.writer.on_settled = lambda num_pages, is_lost: emit(m.Settled(num_pages, is_lost))
        self._loop = asyncio.get_running_loop()

    def serve(self, command: m.Command) -> None:
        """Begin to carry out a command. Never waits."""
        match command:
            case m.LookUp():
                self._tasks.begin(self._look_up(command))
            case m.FetchPages():
                self._fetches[command.work] = self._tasks.begin(self._fetch(command))
            case m.FetchSide():
                self._tasks.begin(self._fetch_side(command))
            case m.Cancel():
                if (task := self._fetches.get(command.work)) is not None:
                    # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
                    asyncio.get_running_loop().call_soon(task.cancel)
            case m.ReadAhead():
                ahead = self._found.pop(command.work, [])
                self.client.fetcher.read_ahead(ahead, expire_s=self._config.fetch_timeout_s)
            case m.Forget():
                if sources := self._found.pop(command.work, None):
                    self._tasks.begin(self.client.fetcher.probe(sources))
            case m.Stage():
                self._stager.begin(command)
            case m.Unstage():
                self._stager.release(command.work, is_sound=command.is_sound)
            case m.Flush():
                self.client.fetcher.drop_unused()
            case m.Write():
                self._write(command)
            case m.FreePiece():
                self._room.free(command.offset)
            case m.Clear():
                self._tasks.begin(self._clear(command))
            case m.ShowPrompts() | m.PauseCalibration() | m.TakeProfile():
                if self._finder is not None:
                    self._finder.serve(command)
            case m.Ping():
                self._emit(m.Pong())
            case m.Start() | m.Close():
                raise AssertionError(f"a running service does not accept {command}")

    def _condemn(self, why: str) -> None:
        namespace, labels = self._heads.namespace, self._heads.labels
        names = labels.model_name(namespace.model), labels.quantiser_name(namespace.quantiser)
        keep_verdict(self._verdict, FailedAudits(self._config.store, *names, namespace.quantiser, why, time.time()))
        self._turn_off(why)

    def _turn_off(self, why: str) -> None:
        """Read and write nothing any more: audits have failed, now or before this start."""
        self.client.finder.turn_off()
        self.client.writer.turn_off()
        metrics.AUDITED_OFF.set(1)
        logger.error(
            "kvfetch: audits have failed, so nothing is read or written, and all is computed: %s. If weights have "
            "changed, attach with a new model_id. Else kvfetch calibrate --publish with prompts like yours, or "
            "quantiser exact. To try again all the same, delete %s and attach again. See docs/audits.md",
            why,
            self._verdict,
        )

    async def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and sockets."""
        await self._tasks.cancel()
        await self._stager.close()
        await self._auditor.close()
        if self._finder is not None:
            await self._finder.close()
        await self.client.close(_CLOSE_S)

    # Lookups

    async def _look_up(self, command: m.LookUp) -> None:
        hashes = split_hashes(command.hashes)
        sources: list[PageSource] = []
        usable = Usable((), {})
        reasons = noted_here()
        try:
            with counted("lookup"):
                sources = await self.client.finder.find_pages(hashes, self._config.lookup_timeout_s)
                if not command.trailing:
                    sources = self._audited(hashes, sources)
                else:
                    usable = await asyncio.to_thread(usable_runs, sources, command.trailing)
                    usable.stored[KV_POOL] = len(sources)
                    sources = sources[: max(usable.lengths, default=0)]
        finally:
            metrics.LOOKUP_PAGES.labels("hit").inc(len(sources))
            metrics.LOOKUP_PAGES.labels("miss").inc(len(hashes) - len(sources))
            if sources:
                self._found[command.work] = sources
                if len(self._found) > _MOST_FOUND:
                    self._found.popitem(last=False)
            cost = self.client.fetcher.cost(sources)
            reason = shortfall(reasons) if len(sources) < len(hashes) else ""
            self._emit(m.Found(command.work, len(sources), cost, usable.lengths, usable.stored, reason))

    def _audited(self, hashes: Sequence[bytes], sources: list[PageSource]) -> list[PageSource]:
        """Return the sources of the pages that are to be served: fewer if a hit is to be audited."""
        num_served = self._auditor.served(hashes, sources)
        if num_served < len(sources):
            note(Reason.AUDIT)
        return sources[:num_served]

    # Fetches

    async def _fetch(self, command: m.FetchPages) -> None:
        finder, hashes = self.client.finder, split_hashes(command.hashes)
        result, timeout_s = FetchResult(), max(0.0, command.deadline_s - time.monotonic())
        reasons = noted_here()
        try:
            with counted("fetch"):
                if finder.is_paused:  # the store keeps failing: do not try, although pages were found
                    miss("fetch", "skipped")
                    return
                sources = await finder.recall(hashes, self._config.lookup_timeout_s)
                destination = self._destination(command.work, len(sources))
                if destination is None:
                    return  # the engine has given it up
                left_s = max(0.0, command.deadline_s - time.monotonic())
                result = await self.client.fetcher.fetch(sources, destination, left_s, compute_s=command.compute_s)
                finder.fetched(hashes, sources, result)
        finally:
            count_fetch(result, len(hashes), timeout_s, self._geometry.page_bytes)
            del self._fetches[command.work]
            self._emit(m.FetchOver(command.work, result.num_pages, shortfall(reasons)))

    async def _fetch_side(self, command: m.FetchSide) -> None:
        finder, hashes = self.client.finder, split_hashes(command.hashes)
        come: list[int] = []

        def take(page: int, content: bytearray) -> None:
            self._send_side(command.work, page, content)
            come.append(page)

        try:
            with counted("fetch"):
                left_s = command.deadline_s - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        sources = await finder.recall(hashes, min(left_s, self._config.lookup_timeout_s))
                        failures = await self.client.side_fetcher.fetch(
                            sources, command.pool, self._sides[command.pool], take
                        )
                except TimeoutError as e:
                    finder.sides_fetched(hashes, [e])
                    raise
                for failure in failures:
                    count_miss("fetch", failure)
                finder.sides_fetched(hashes, failures)
        finally:
            metrics.SIDE_PAGES.labels(command.pool, "hit").inc(len(come))
            metrics.SIDE_PAGES.labels(command.pool, "miss").inc(len(hashes) - len(come))
            self._emit(m.SideOver(command.work, tuple(come)))

    # Writes

    def _write(self, command: m.Write) -> None:
        """Queue pages. They are read from shared memory until they are encoded: then it is the engine's again."""
        hashes = split_hashes(command.hashes)
        try:
            batch = self._batch(command, hashes)
            self._auditor.handed_over(batch)
            self.client.writer.add(batch)
        except Exception:
            logger.exception("kvfetch: taking pages for writing failed")
            self._emit(m.Settled(len(hashes)))

    def _batch(self, command: m.Write, hashes: Sequence[bytes]) -> PageBatch:
        geometry = self._geometry
        num_tokens, value_bytes = len(hashes) * geometry.page_size, len(hashes) * geometry.page_bytes
        num_rows = [rows for rows, _ in command.cells]
        if command.cells:
            value_bytes = num_tokens * (len(num_rows) + sum(num_rows))
        sizes = [self._sides[pool] for pool, _ in command.sides]
        # Not emitted at once: tensors end at any point of this program, also while a message is being sent.
        emit = partial(self._call_soon, self._emit, m.Taken(command.work))
        memory = self._written.lend(command.offset, value_bytes + sum(sizes), emit)
        pages: Pages
        if command.cells:
            rows = memory[:value_bytes].view(-1, num_tokens)
            exponents, *integers = torch.split(rows, [len(num_rows), *num_rows])
            sizes_of_exact = [size for _, size in command.cells]
            # Copied, too: there are few.
            exact = self._written.view(command.exact, torch.uint8, (sum(sizes_of_exact),)).clone()
            cells = list(zip(exponents, torch.split(exact, sizes_of_exact), integers, strict=True))
            page_bytes = -(-(value_bytes + len(exact)) // len(hashes))
            pages = QuantisedPages(cells, range(len(hashes)), geometry.page_size, page_bytes)
        else:
            pages = RawPages(*pages_in(memory, geometry, len(hashes)))
        # Copies: they are encoded with their segment, which the memory of their pages should not wait for.
        sides = [x.clone() for x in tensors_in(memory[value_bytes:], torch.uint8, ((size,) for size in sizes))]
        by_page = dict(zip(command.sides, sides, strict=True))
        return PageBatch(command.first_page, command.previous_hash, hashes, [pages], by_page)

    def _call_soon(self, *call: Any) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(*call)

    async def _clear(self, command: m.Clear) -> None:
        fault = ""
        try:
            async with asyncio.timeout(_CLEAR_S):
                await self.client.clear(self._heads)
        except TimeoutError:
            fault = f"it took longer than {_CLEAR_S:g} s"
        except KVFetchError as e:
            fault = str(e)
        finally:
            self._emit(m.ClearOver(command.work, fault))


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

    def emit(event: m.Event) -> None:
        (for_steps if isinstance(event, m.Staged) else others).send(event)

    commands: m.MessageReader[m.Command] = m.MessageReader(m.Command)
    service: Service | None = None
    room: Room | None = None
    try:
        while data := await loop.sock_recv(line.commands, 1 << 18):
            for command in commands.feed(data):
                match command:
                    case m.Start():
                        config, heads, client = _open(command, line, open_)
                        room = Room(line.values.num_bytes - config.memory_cache)
                        service = Service(command, config, heads, client, line, room, emit, destination)
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
        if room is not None:
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


def _open(command: m.Start, line: Line, open_: OpenClient) -> tuple[KVFetchConfig, HeadSlice, StoreClient]:
    """Open the store for ``Start``. Raises KVFetchError."""
    if command.version != m.VERSION:
        raise FormatError(f"expected message version {m.VERSION} from the engine, found {command.version}")
    timeline.start(f"{command.rank}.data")
    config = KVFetchConfig.model_validate(command.config)
    heads = HeadSlice(command.namespace, range(command.first_head, command.end_head), command.labels)
    # Behind what the engine takes from, in the same memory: a GPU may take what is there, too.
    memory = MemoryCache(line.values, config.memory_cache) if config.memory_cache else None
    return config, heads, open_(config, heads, command, memory)


def open_alone(config: KVFetchConfig, heads: HeadSlice, start: m.Start, memory: MemoryCache | None) -> StoreClient:
    """Open the store for a data plane in a process of its own. Raises KVFetchError."""
    nvdec = None
    if start.gpu is not None:
        nvdec, about = open_nvdec_alone(start.gpu)
        logger.info("kvfetch: %s", about)
    codecs = (CODEC,) if start.takes_code else ()
    most = start.most_span_pages
    return open_client(
        config,
        heads,
        config_quantiser(config),
        nvdec=nvdec,
        max_span_pages=most,
        engine_codecs=codecs,
        memory=memory,
    )
