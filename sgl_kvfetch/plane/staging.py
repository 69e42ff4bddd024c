"""Staging: the data plane restores a prompt's stored pages into shared memory before the engine admits the prompt.

The engine asks once for a prompt (`messages.Stage`), and is told once how many pages are there. It then copies them
into its pool whenever it likes. So it takes part in nothing that happens in between.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.keys import HeadSlice, split_hashes
from sgl_kvfetch.plane import messages as m
from sgl_kvfetch.plane.arena import Arena, Emit, Room
from sgl_kvfetch.plane.choice import Decision, EngineQueue, FetchLag, FetchOrRecompute
from sgl_kvfetch.plane.client import StoreClient, count_fetch, counted
from sgl_kvfetch.plane.coded import CodedRegion, RegionPlan, StagedCode, gpu_restores
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.fetch.fetcher import FetchResult
from sgl_kvfetch.plane.fetch.plan import PageSource, SpanPart, span_parts
from sgl_kvfetch.plane.fetch.sink import Destination, GuardedSink, PagePool, consecutive_runs
from sgl_kvfetch.plane.memory_cache import Held
from sgl_kvfetch.plane.misses import miss, note, noted_here, shortfall
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.types import TENSORS, KVGeometry

NO_VALUES = CellValues(*(torch.empty((0, 0, 0, 0)) for _ in TENSORS))
_Points = Sequence[tuple[int, float]]
_SHARED_TOKENS = 8192  # fetches that share the link have so many tokens in total, at most
# Shortest first, with ageing: a later fetch overtakes only if it is shorter by more than so many pages per arrival
# since the earlier fetch. So none starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8

F = TypeVar("F", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StagedValues:
    """The engine's view of a staged prompt. ``values``: as `region_views` returns them, of which the first
    ``num_pages`` pages are restored and verified. ``num_found``: how many are stored. ``end``, ``reason``: as in
    `messages.Staged`. ``memory``: all shared memory, uint8. ``code``: the cells of these pages, if they are still
    coded; then there are no values."""

    num_pages: int
    num_found: int
    end: str
    memory: torch.Tensor
    values: CellValues = NO_VALUES
    code: StagedCode | None = None
    reason: str = ""


def region_views(arena: Arena, offset: int, geometry: KVGeometry, num_pages: int) -> CellValues:
    """Return K and V of a region: ``(layers, num_pages * page_size, heads, dim)`` each. A layer's values lie together,
    since the engine takes them layer by layer."""
    common = geometry.num_layers, num_pages * geometry.page_size, geometry.num_heads
    return CellValues(*arena.views(offset, geometry.torch_dtype, ((*common, geometry.head_dim(t)) for t in TENSORS)))


class _Region(PagePool):
    """A region of shared memory, as a pool whose pages are those of the prompt."""

    def __init__(self, views: CellValues, page_size: int) -> None:
        self._views = views
        self._page_size = page_size

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        size = self._page_size
        for view, x in zip(self._views, values, strict=True):
            into = view[layers.start : layers.stop, :, heads.start : heads.stop]
            rows = x.transpose(0, 1)
            for run, positions in consecutive_runs(pages):
                tokens = slice(positions.start * size, positions.stop * size)
                into[:, run.start * size : run.stop * size] = rows[:, tokens]


@dataclass(slots=True, eq=False)
class _Staging:
    """``turn``: done when the fetch may begin. ``needs_link``: whether not all bytes are in memory. ``num_bytes``: of
    its region, which is at ``offset`` from its turn on. ``held``: what it needs of `memory_cache`. ``tables``: where
    the tables of coded cells are, and their numbers of cells and bytes. ``data_names``: the objects that it is read
    from. ``is_wanted``: whether the engine has not released it."""

    turn: asyncio.Future[None]
    task: asyncio.Task[None] | None = None
    num_pages: int = 0
    needs_link: bool = True
    num_bytes: int = 0
    offset: int | None = None
    held: Held = field(default_factory=Held)
    tables: tuple[int, int, int] | None = None
    data_names: set[str] = field(default_factory=set)
    is_wanted: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides when a fetch gets the link."""

    num_pages: int
    arrival: int  # serial number, in order of arrival

    @property
    def rank(self) -> tuple[int, int]:
        """The first one's is the least."""
        return self.num_pages + AGEING_PAGES * self.arrival, self.arrival


class LinkQueue(Generic[F]):
    """Holds the fetches that wait for the link and those that occupy it.

    A large fetch gets the link alone, as in KVFetcher (section 3.3.1): even shares would only make both late. Small
    ones share the link, because it would be idle between them.
    """

    def __init__(self, shared_pages: int) -> None:
        """``shared_pages``: how many pages the fetches that share the link may have in total."""
        self._claims: dict[F, Claim] = {}  # of the fetches that wait
        self._waiting: list[F] = []  # by rank
        self._on_link: dict[F, int] = {}  # requested pages of each fetch that occupies the link
        self._shared_pages = shared_pages
        self._expected: dict[F, int] = {}  # pages still to be fetched for each fetch, waiting or not
        self.expected_pages = 0  # their sum

    def wait(self, fetch: F, claim: Claim) -> None:
        self._claims[fetch] = claim
        bisect.insort(self._waiting, fetch, key=self._rank)

    def leave(self, fetch: F) -> None:
        """Remove a fetch that no longer waits."""
        index = bisect.bisect_left(self._waiting, self._rank(fetch), key=self._rank)
        assert self._waiting[index] is fetch
        del self._waiting[index], self._claims[fetch]

    def _rank(self, fetch: F) -> tuple[int, int]:
        return self._claims[fetch].rank

    def first(self) -> F | None:
        """Return the fetch whose turn it is."""
        return self._waiting[0] if self._waiting else None

    def has_room(self, fetch: F) -> bool:
        """Return whether the link can serve ``fetch``, which waits, beside those that occupy it."""
        return not self._on_link or sum(self._on_link.values()) + self._claims[fetch].num_pages <= self._shared_pages

    def occupy(self, fetch: F, num_pages: int) -> None:
        """Note that ``fetch`` occupies the link: ``num_pages`` of its pages are now requested."""
        self._on_link[fetch] = num_pages

    def give_back(self, fetch: F) -> None:
        """Note that the link could serve another fetch beside ``fetch``."""
        self._on_link.pop(fetch, None)

    def expect(self, fetch: F, num_pages: int) -> None:
        """Set how many pages are still to be fetched for ``fetch``."""
        self.expected_pages += num_pages - self._expected.pop(fetch, 0)
        if num_pages:
            self._expected[fetch] = num_pages


class _Turns:
    """Lets stagings begin one after another, in the order of a `LinkQueue`, when link and memory have room for them.
    Those that do not need the link wait for memory alone, and go first."""

    def __init__(self, config: KVFetchConfig, geometry: KVGeometry, room: Room) -> None:
        """``room``: as large as the pool that the engine loads into. A staging may take all of it if there is no other
        one, and else the config's share."""
        self._queue: LinkQueue[_Staging] = LinkQueue(max(1, _SHARED_TOKENS // geometry.page_size))
        self._room = room
        self._most_bytes = config.device.pool_share * room.num_bytes
        self._used_bytes = 0
        self._num_arrived = 0
        self._without_link: dict[_Staging, None] = {}

    @property
    def pages_ahead(self) -> int:
        """How many pages are still to be fetched for those that wait or have begun."""
        return self._queue.expected_pages

    async def wait(self, staging: _Staging, deadline_s: float) -> None:
        """Wait for a turn, which gives the staging its region. Raises TimeoutError."""
        if staging.needs_link:
            self._num_arrived += 1
            self._queue.expect(staging, staging.num_pages)
            self._queue.wait(staging, Claim(staging.num_pages, self._num_arrived))
        else:
            self._without_link[staging] = None
        try:
            self._serve()
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await staging.turn
        finally:
            if staging.offset is None:
                self._leave(staging)
                self.end(staging)

    def free(self, staging: _Staging) -> None:
        """Free a staging's region, if it has one. Nothing more is fetched for it."""
        if staging.offset is not None:
            self._room.free(staging.offset)
            self._used_bytes -= staging.num_bytes
        if staging.tables is not None:
            self._room.free(staging.tables[0])
        self.end(staging)

    def shrink(self, staging: _Staging, num_bytes: int) -> None:
        """Free all but the first ``num_bytes`` of a staging's region."""
        assert staging.offset is not None
        self._room.shrink(staging.offset, num_bytes)
        self._used_bytes -= staging.num_bytes - num_bytes
        staging.num_bytes = num_bytes
        self._serve()

    def link_has_room(self, staging: _Staging) -> None:
        self._queue.give_back(staging)
        self._serve()

    def end(self, staging: _Staging) -> None:
        """Note that nothing more is fetched for a staging."""
        self._queue.expect(staging, 0)
        self.link_has_room(staging)

    def _leave(self, staging: _Staging) -> None:
        if staging.needs_link:
            self._queue.leave(staging)
        else:
            del self._without_link[staging]

    def _next(self) -> _Staging | None:
        if self._without_link:
            return next(iter(self._without_link))
        first = self._queue.first()
        return first if first is not None and self._queue.has_room(first) else None

    def _serve(self) -> None:
        while (staging := self._next()) is not None:
            used_bytes = self._used_bytes + staging.num_bytes
            if self._used_bytes and staging.num_bytes and used_bytes > self._most_bytes:
                return
            staging.offset = self._room.allocate(staging.num_bytes, 0)
            if staging.offset is None:
                return
            self._used_bytes += staging.num_bytes
            self._leave(staging)
            if staging.needs_link:
                self._queue.occupy(staging, staging.num_pages)
            if not staging.turn.done():
                staging.turn.set_result(None)


class Stager:
    """Carries out `messages.Stage`. Belongs to one event loop."""

    def __init__(
        self,
        config: KVFetchConfig,
        heads: HeadSlice,
        client: StoreClient,
        emit: Emit,
        arena: Arena,
        room: Room,
        *,
        takes_code: bool = False,
        audited: Callable[[Sequence[bytes], list[PageSource]], list[PageSource]] = lambda hashes, sources: sources,
    ) -> None:
        """``room`` allocates bytes of ``arena``. ``takes_code``: as in `messages.Start`. ``audited`` returns the
        sources of those pages that are to be served."""
        self._audited = audited
        self._config = config
        # A decode profile chooses the variant of each read when it begins, too late for a region's layout.
        self._takes_code = takes_code and config.decode_profile is None
        self._room = room
        self._geometry = heads.geometry
        self._client = client
        self._emit = emit
        self._arena = arena
        self._most_pages = room.num_bytes // heads.geometry.page_bytes
        self._tasks = Tasks()
        self._stagings: dict[int, _Staging] = {}  # by number
        self._decoded_here: set[str] = set()  # objects that the engine could not decode
        self._turns = _Turns(config, heads.geometry, room)
        self._choice = FetchOrRecompute()
        self._lag = FetchLag()
        self._engine = EngineQueue()  # prompts that were left to the engine

    def begin(self, command: m.Stage) -> None:
        if command.is_idle:
            self._engine.clear()
        staging = self._stagings[command.work] = _Staging(asyncio.get_running_loop().create_future())
        staging.task = self._tasks.begin(self._stage(command, staging))

    def release(self, work: int, *, is_sound: bool) -> None:
        """Free a region, or end its staging soon, which frees it. ``is_sound``: as in `messages.Unstage`."""
        staging = self._stagings.get(work)
        if staging is None:  # it ended without pages, or an earlier data plane had it
            return
        if not is_sound:
            self._decoded_here |= staging.data_names
            for name in staging.data_names:
                self._client.fetcher.drop_kept(name)
        staging.is_wanted = False
        if staging.task is None:
            self._forget(work, staging)
        else:
            # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
            asyncio.get_running_loop().call_soon(staging.task.cancel)

    def _forget(self, work: int, staging: _Staging) -> None:
        del self._stagings[work]
        staging.held.let_go()
        self._turns.free(staging)

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _stage(self, command: m.Stage, staging: _Staging) -> None:
        hashes = split_hashes(command.hashes)
        request = timeline.Request(command.request_id, command.traceparent)
        num_pages, end = 0, "missed"
        reasons = noted_here()
        try:
            sources = self._audited(hashes, (await self._look_up(hashes, request))[: self._most_pages])
            staging.held = self._client.fetcher.hold(sources)
            staging.num_pages = len(sources)
            if not staging.is_wanted:
                pass
            elif not sources:
                self._computes(command.saved_s, len(hashes))
            else:
                num_pages, end = await self._fetch(command, staging, hashes[: len(sources)], sources, request)
        finally:
            staging.task = None
            num_found, offset, tables = staging.num_pages, staging.offset or 0, staging.tables or (0, 0, 0)
            if staging.is_wanted and num_pages:
                if staging.tables is None:  # it is restored: nothing of it lies there
                    staging.held.let_go()
                staging.held.end_filling()
                self._turns.end(staging)
            else:
                self._forget(command.work, staging)
                num_pages = 0
            timeline.fetched(request)
            if not num_pages:
                tables = (0, 0, 0)
            place, num_cells, tables_bytes = tables
            reason = shortfall(reasons) if num_pages < len(hashes) else ""
            self._emit(
                m.Staged(command.work, num_pages, num_found, offset, end, num_cells, place, tables_bytes, reason)
            )

    async def _look_up(self, hashes: list[bytes], request: timeline.Request) -> list[PageSource]:
        started_s = time.monotonic()
        sources: list[PageSource] = []
        with counted("lookup"):
            sources = await self._client.finder.find_pages(hashes, self._config.lookup_timeout_s)
        metrics.LOOKUP_PAGES.labels("hit").inc(len(sources))
        metrics.LOOKUP_PAGES.labels("miss").inc(len(hashes) - len(sources))
        timeline.add(request, "lookup", started_s, time.monotonic(), pages=len(hashes), found=len(sources))
        return sources

    async def _fetch(
        self,
        command: m.Stage,
        staging: _Staging,
        hashes: list[bytes],
        sources: Sequence[PageSource],
        request: timeline.Request,
    ) -> tuple[int, str]:
        """Fetch pages, unless computing them is sooner. Return how many, from the first on, are there, and the
        outcome."""
        found_s = time.monotonic()
        cost = self._client.fetcher.cost(sources)
        staging.needs_link = cost.transmit_s != 0.0
        parts = span_parts(sources)
        staging.data_names = {part.reader.data_name for part in parts}
        is_coded = self._takes_code and gpu_restores(sources) and not staging.data_names & self._decoded_here
        plan = self._plan(parts, staging) if is_coded else None
        if plan is not None and plan.num_bytes > self._room.num_bytes:  # a manifest may say so of its cells
            plan = None
        staging.num_bytes = len(sources) * self._geometry.page_bytes if plan is None else plan.num_bytes
        num_ahead = self._turns.pages_ahead if staging.needs_link else 0
        if not self._is_fetched(cost, num_ahead, command.saved_s, len(sources), found_s):
            self._computes(command.saved_s, len(sources))
            self._tasks.begin(self._client.fetcher.probe(sources))
            note(Reason.SOONER)
            return 0, "recomputed"
        try:
            await self._turns.wait(staging, found_s + self._config.fetch_timeout_s)
        except TimeoutError:
            miss("fetch", "late")
            return 0, "failed"
        assert staging.offset is not None
        pool: CodedRegion | _Region
        self._client.fetcher.open(staging.held, parts)
        if plan is not None:
            plan = self._plan(parts, staging)
            self._turns.shrink(staging, plan.num_bytes)
            pool = CodedRegion(self._arena, staging.offset, plan)
        else:
            views = region_views(self._arena, staging.offset, self._geometry, len(sources))
            pool = _Region(views, self._geometry.page_size)
        compute_s = self._compute_s(command.saved_s, len(sources), time.monotonic())
        num_pages = await self._restore(
            staging, pool, hashes, sources, request, found_s, math.inf if compute_s is None else compute_s
        )
        if isinstance(pool, CodedRegion) and num_pages and not self._put_tables(staging, pool, num_pages):
            miss("fetch", "no_slots")
            return 0, "failed"
        if num_pages == len(sources) and not num_ahead:
            if cost.seconds is None:  # this fetch has measured it; what is in memory now was not there
                cost = self._client.fetcher.cost(sources)
                cost = cost if cost.transmit_s or not staging.needs_link else m.Cost(None, None)
            if cost.seconds is not None:
                self._lag.ended(time.monotonic(), found_s + cost.seconds)
        return num_pages, "landed" if num_pages == len(sources) else "partly" if num_pages else "failed"

    def _plan(self, parts: Sequence[SpanPart], staging: _Staging) -> RegionPlan:
        return RegionPlan(parts, [staging.held.entry(part.reader, part.span) for part in parts])

    def _compute_s(self, saved_s: _Points, num_pages: int, now_s: float) -> float | None:
        """Return how much longer a request would take without so many pages: it waits for the engine, which computes
        them. None if that is not to be considered. ``saved_s``: as in `messages.Stage`."""
        if not saved_s or self._config.recompute != "auto":
            return None
        return interpolate(saved_s, num_pages) + self._engine.seconds(now_s)

    def _computes(self, saved_s: _Points, num_pages: int) -> None:
        """Note that the engine is to compute so many pages."""
        self._engine.add(max(0.0, interpolate(saved_s, num_pages)), time.monotonic())

    def _is_fetched(self, cost: m.Cost, num_ahead: int, saved_s: _Points, num_pages: int, now_s: float) -> bool:
        """Decide. Pages that are fetched before these are assumed to cost as much each."""
        decision = Decision(True, "configured")
        num_tokens = num_pages * self._geometry.page_size
        if self._config.recompute == "auto":
            times = 1 + num_ahead / num_pages
            stages = (None if seconds is None else times * seconds for seconds in (cost.transmit_s, cost.decode_s))
            compute_s = self._compute_s(saved_s, num_pages, now_s)
            sooner_s = None if compute_s is None else compute_s - self._lag.seconds(now_s)
            decision = self._choice.decide(num_tokens, m.Cost(*stages), sooner_s)
        decision.count(num_tokens)
        return decision.is_fetched

    async def _restore(
        self,
        staging: _Staging,
        pool: PagePool,
        hashes: list[bytes],
        sources: Sequence[PageSource],
        request: timeline.Request,
        found_s: float,
        compute_s: float,
    ) -> int:
        """Restore pages into ``pool``, the staging's region. Return how many, from the first on, are there."""
        result, timeout_s = FetchResult(), self._config.fetch_timeout_s
        with counted("fetch"):
            result = await self._client.fetcher.fetch(
                sources,
                Destination(range(len(sources)), GuardedSink(pool)),
                max(0.0, found_s + timeout_s - time.monotonic()),
                request=request,
                on_requested=partial(self._turns.link_has_room, staging),
                compute_s=compute_s,
                held=staging.held,
            )
            self._client.finder.fetched(hashes, sources, result)
        count_fetch(result, len(sources), timeout_s, self._geometry.page_bytes)
        return result.num_pages

    def _put_tables(self, staging: _Staging, region: CodedRegion, num_pages: int) -> bool:
        """Put the tables of coded cells into shared memory. Return whether there is room for them."""
        num_cells, tables = region.tables(num_pages)
        fits = len(tables) <= self._room.num_bytes  # those of a whole span, all of whose tokens are exact, may not
        place = self._room.allocate(len(tables), 0) if fits else None
        if place is None:
            return False
        self._arena.buffer(place, len(tables))[:] = tables
        staging.tables = place, num_cells, len(tables)
        return True


def interpolate(points: _Points, x: int) -> float:
    """Return the value at ``x`` of a line from the origin through ``points``, which are in ascending order. Behind the
    last point, the line is level."""
    x0, y0 = 0, 0.0
    for x1, y1 in points:
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        x0, y0 = x1, y1
    return y0
