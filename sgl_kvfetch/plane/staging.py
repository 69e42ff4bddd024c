"""Staging: the data plane brings a prompt's stored pages near before the engine admits the prompt.

The engine asks once for a prompt (`protocol.Stage`). Here it is looked up, and here is decided whether it is fetched or
computed, in both modes. What follows differs:

* In device mode, pages are restored into shared memory, and the engine is told once how many are there. It then copies
  them into its pool whenever it likes. So it takes part in nothing that happens in between.
* In host mode, SGLang first wants to know how many pages there are, then finds room in its host pool, and then takes
  the pages in batches, prompt by prompt. So only the bytes are read ahead; each batch is restored right into the host
  pool when SGLang has said where it goes (`protocol.FetchPages`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import msgspec
import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.codec import CellValues, SideKey
from sgl_kvfetch.keys import HeadSlice, split_hashes
from sgl_kvfetch.metrics import counted, miss, note, noted_here, shortfall
from sgl_kvfetch.plane import protocol as m
from sgl_kvfetch.plane.arena import Arena, Emit, Room, StridedPages
from sgl_kvfetch.plane.choice import Cost, FetchOrder, Points
from sgl_kvfetch.plane.coded import CodedRegion, RegionPlan, StagedCode, gpu_restores
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.fetch.fetcher import Destination, FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.finder import KV_POOL, SideFetcher, Usable, usable_runs
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.memory_cache import Held
from sgl_kvfetch.plane.store import StoreClient
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.types import TENSORS, KVGeometry

NO_VALUES = CellValues(*(torch.empty((0, 0, 0, 0)) for _ in TENSORS))
_SHARED_TOKENS = 8192  # fetches that share the link have so many tokens in total, at most
# Shortest first, with ageing: a later fetch overtakes only if it is shorter by more than so many pages per arrival
# since the earlier fetch. So none starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8

F = TypeVar("F", bound=Hashable)


@dataclass(frozen=True, slots=True)
class StagedValues:
    """The engine's view of what `protocol.Staged` says. ``values``: as `region_views` returns them, of which the first
    ``num_pages`` pages are restored and verified. ``memory``: all shared memory, uint8. ``code``: the cells of these
    pages, if they are still coded; then there are no values. ``sides``: the side pages that these pages need at their
    end, uint8 ``(bytes,)``. It stays readable when the data plane has ended."""

    num_pages: int
    num_found: int
    memory: torch.Tensor
    values: CellValues = NO_VALUES
    code: StagedCode | None = None
    reason: str = ""
    sides: Mapping[SideKey, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, staged: m.Staged, arena: Arena, geometry: KVGeometry, side_bytes: Mapping[str, int] | None = None
    ) -> StagedValues:
        """``side_bytes``: of a page in each side pool."""
        values, code = NO_VALUES, None
        if staged.code is not None:
            tables = arena.view(staged.code.offset, torch.uint8, (staged.code.num_bytes,))
            code = StagedCode.of(tables, staged.code.num_cells)
        elif staged.num_pages:
            values = region_views(arena, staged.offset, geometry, staged.num_found)
        sides = side_views(staged, arena, side_bytes or {})
        return cls(staged.num_pages, staged.num_found, arena.whole, values, code, staged.reason, sides)

    def of_pages(self, pages: range, page_size: int) -> StagedValues:
        """Return ``pages`` of these alone, counted from the first of them. No table of the result names another page,
        so whoever loads it cannot write behind the slots of these."""
        assert 0 <= pages.start <= pages.stop <= self.num_pages, (pages, self.num_pages)
        tokens = slice(pages.start * page_size, pages.stop * page_size)
        values = CellValues(*(x[:, tokens] for x in self.values))
        if len(pages) == self.num_pages:  # of code and side pages, there are no others
            return replace(self, values=values)
        code = None if self.code is None else self.code.of_pages(pages)
        sides = {(pool, page - pages.start): x for (pool, page), x in self.sides.items() if page in pages}
        return replace(self, num_pages=len(pages), values=values, code=code, sides=sides)

    @property
    def end(self) -> str:
        """The outcome, one of `metrics.ENDS`."""
        if self.num_pages:
            return "landed" if self.num_pages == self.num_found else "partly"
        if self.reason == Reason.SOONER:
            return "recomputed"
        return "failed" if self.num_found else "missed"


def region_views(arena: Arena, offset: int, geometry: KVGeometry, num_pages: int) -> CellValues:
    """Return K and V of a region: ``(layers, num_pages * page_size, heads, dim)`` each. A layer's values lie together,
    since the engine takes them layer by layer."""
    common = geometry.num_layers, num_pages * geometry.page_size, geometry.num_heads
    return CellValues(*arena.views(offset, geometry.torch_dtype, ((*common, geometry.head_dim(t)) for t in TENSORS)))


def side_views(staged: m.Staged, arena: Arena, side_bytes: Mapping[str, int]) -> dict[SideKey, torch.Tensor]:
    """Return the side pages that were staged, uint8 ``(bytes,)``. ``side_bytes``: of a page in each side pool."""
    if staged.sides is None:
        return {}
    sizes = ((side_bytes[pool],) for pool, _ in staged.sides.keys)
    return dict(zip(staged.sides.keys, arena.views(staged.sides.offset, torch.uint8, sizes), strict=True))


# The first and the last page, whose hashes identify all between them, and the side pools that are needed.
_SharedAs = tuple[bytes, bytes, frozenset[tuple[str, int]]]


@dataclass(slots=True)
class _Asked:
    """What the engine asked for under one number. ``reasons``: why it gets less, as far as no other work shares them.
    ``is_wanted``: whether the engine has not released it."""

    num_pages: int = 0
    reasons: list[str] = field(default_factory=list)
    is_wanted: bool = True


@dataclass(slots=True, eq=False)
class _Staging:
    """``works``: by the engine's numbers; stagings of the same pages are one. ``needs_link``: whether not all bytes are
    in memory. ``rank``: the least one's turn comes first. ``num_bytes``: of its region, which is at ``offset`` from its
    turn on. ``held``: what it needs of `memory_cache`, if there is one. ``code``, ``sides``: as in `protocol.Staged`.
    ``data_names``: the objects that it is read from. ``shared_as``: identifies its pages. ``reasons``: why its fetch
    brings less. ``staged``: the answer, but for ``work`` and ``reason``, once it has pages."""

    works: dict[int, _Asked]
    task: asyncio.Task[None] | None = None
    num_pages: int = 0
    needs_link: bool = True
    rank: tuple[int, int] = 0, 0
    num_bytes: int = 0
    offset: int | None = None
    held: Held | None = None
    code: m.CodedCells | None = None
    sides: m.SidePages | None = None
    data_names: set[str] = field(default_factory=set)
    shared_as: _SharedAs | None = None
    reasons: list[str] = field(default_factory=list)
    staged: m.Staged | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the engine has not released it."""
        return any(asked.is_wanted for asked in self.works.values())

    def answer(self, work: int) -> m.Staged:
        asked = self.works[work]
        staged = m.Staged(work, 0, self.num_pages)
        if self.staged is not None and asked.is_wanted:
            staged = msgspec.structs.replace(self.staged, work=work)
        reason = shortfall([*asked.reasons, *self.reasons]) if staged.num_pages < asked.num_pages else ""
        return msgspec.structs.replace(staged, reason=reason)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The pages of a `Stage` that were found. ``end_s``: when the fetch must end, in time.monotonic()."""

    hashes: Sequence[bytes]
    sources: Sequence[PageSource]
    trailing: Mapping[str, int]
    saved_s: Points
    request: timeline.Request
    found_s: float
    end_s: float


class _Turns:
    """Lets stagings begin one after another, when link and memory have room for them.

    A large one gets the link alone, as in KVFetcher (section 3.3.1): even shares would only make both late. Small ones
    share the link, because it would be idle between them. Those that do not need the link wait for memory alone, and go
    first.
    """

    def __init__(self, config: KVFetchConfig, geometry: KVGeometry, room: Room) -> None:
        """``room``: as large as the pool that the engine loads into. A staging may take all of it if there is no other
        one, and else the config's share."""
        self._shared_pages = max(1, _SHARED_TOKENS // geometry.page_size)
        self._room = room
        self._most_bytes = config.device.pool_share * room.num_bytes
        self._used_bytes = 0
        self._num_arrived = 0
        self._waiting: dict[_Staging, asyncio.Future[None]] = {}  # in the order of arrival
        self._to_come: set[_Staging] = set()  # those for which the link is to bring pages, waiting or not
        self._on_link: set[_Staging] = set()  # those among them that occupy it

    @property
    def pages_ahead(self) -> int:
        """How many pages the link is to bring for those that wait or have begun."""
        return sum(staging.num_pages for staging in self._to_come)

    async def wait(self, staging: _Staging, deadline_s: float) -> None:
        """Wait for a turn, which gives the staging its region. Raises TimeoutError."""
        if staging.needs_link:
            self._num_arrived += 1
            staging.rank = staging.num_pages + AGEING_PAGES * self._num_arrived, self._num_arrived
            self._to_come.add(staging)
        turn = self._waiting[staging] = asyncio.get_running_loop().create_future()
        try:
            self._serve()
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await turn
        finally:
            if staging.offset is None:
                del self._waiting[staging]
                self.end(staging)

    def free(self, staging: _Staging) -> None:
        """Free a staging's region, if it has one. Nothing more is fetched for it."""
        if staging.offset is not None:
            self._room.free(staging.offset)
            self._used_bytes -= staging.num_bytes
        for place in (staging.code, staging.sides):
            if place is not None:
                self._room.free(place.offset)
        self.end(staging)

    def shrink(self, staging: _Staging, num_bytes: int) -> None:
        """Free all but the first ``num_bytes`` of a staging's region."""
        assert staging.offset is not None
        self._room.shrink(staging.offset, num_bytes)
        self._used_bytes -= staging.num_bytes - num_bytes
        staging.num_bytes = num_bytes
        self._serve()

    def link_has_room(self, staging: _Staging) -> None:
        """Note that the link could serve another one beside ``staging``."""
        self._on_link.discard(staging)
        self._serve()

    def end(self, staging: _Staging) -> None:
        """Note that nothing more is fetched for a staging."""
        self._to_come.discard(staging)
        self.link_has_room(staging)

    def _next(self) -> _Staging | None:
        first = min(self._waiting, key=lambda staging: staging.rank, default=None)
        if first is None or not first.needs_link or not self._on_link:
            return first
        num_pages = sum(staging.num_pages for staging in (first, *self._on_link))
        return first if num_pages <= self._shared_pages else None

    def _serve(self) -> None:
        while (staging := self._next()) is not None:
            used_bytes = self._used_bytes + staging.num_bytes
            if self._used_bytes and staging.num_bytes and used_bytes > self._most_bytes:
                return
            staging.offset = self._room.allocate(staging.num_bytes, 0)
            if staging.offset is None:
                return
            self._used_bytes += staging.num_bytes
            turn = self._waiting.pop(staging)
            if staging.needs_link:
                self._on_link.add(staging)
            if not turn.done():
                turn.set_result(None)


class Stager:
    """Carries out `protocol.Stage`, `FetchPages` and `FetchSide`. Belongs to one event loop."""

    def __init__(
        self,
        config: KVFetchConfig,
        heads: HeadSlice,
        client: StoreClient,
        answer: Emit,
        arena: Arena,
        room: Room,
        start: m.Start,
        *,
        pool: StridedPages,
        audited: Callable[[Sequence[bytes], list[PageSource]], list[PageSource]],
    ) -> None:
        """``answer``: as for `Service`. ``room`` allocates bytes of ``arena``. ``pool``: where fetched pages go.
        ``audited`` returns the sources of those pages that are to be served."""
        self._pool = pool
        self._sides = start.sides
        self._side_fetcher = SideFetcher(client.store, client.finder, client.fetcher.report_damage)
        self._audited = audited
        self._config = config
        self._takes_code = start.takes_code
        self._room = room
        self._geometry = heads.geometry
        self._client = client
        self._answer = answer
        self._arena = arena
        self._most_pages = room.num_bytes // heads.geometry.page_bytes
        self._tasks = Tasks()
        self._stagings: dict[int, _Staging] = {}  # by number
        self._shared: dict[_SharedAs, _Staging] = {}  # that others may join
        self._decoded_here: set[str] = set()  # objects that the engine could not decode
        self._turns = _Turns(config, heads.geometry, room)
        self._order = FetchOrder(heads.geometry.page_size, may_compute=config.recompute == "auto")

    def begin(self, command: m.Stage) -> None:
        if command.is_idle:
            self._order.engine.clear()
        if command.is_read_ahead:
            self._tasks.begin(self._read_ahead(command))
        else:
            self._begin(command.work, partial(self._stage, command))

    def _begin(self, work: int, run: Callable[[_Staging], Coroutine[Any, Any, None]]) -> None:
        staging = self._stagings[work] = _Staging({work: _Asked()})
        staging.task = self._tasks.begin(run(staging))

    def release(self, command: m.Unstage) -> None:
        """Free what was staged, or end a staging or a fetch soon."""
        work = command.work
        self._takes_code = self._takes_code and command.takes_code
        staging = self._stagings.pop(work, None)
        if staging is None:  # it ended without pages, or an earlier data plane had it
            return
        if not command.is_sound:
            self._decoded_here |= staging.data_names
            for name in staging.data_names:
                self._client.fetcher.drop_kept(name)
            self._share_no_more(staging)
        staging.works[work].is_wanted = False
        if staging.is_wanted:  # by others
            return
        if staging.task is None:
            self._free(staging)
        else:
            self._share_no_more(staging)
            # Not at once: a task that is cancelled before its first step never runs, not even its ``finally``.
            asyncio.get_running_loop().call_soon(staging.task.cancel)

    def _forget(self, staging: _Staging) -> None:
        """Free a staging that brings nothing."""
        for work in staging.works:
            self._stagings.pop(work, None)
        self._free(staging)

    def _free(self, staging: _Staging) -> None:
        self._share_no_more(staging)
        if staging.held is not None:
            staging.held.let_go()
        self._turns.free(staging)

    def _share_no_more(self, staging: _Staging) -> None:
        if staging.shared_as is not None and self._shared.get(staging.shared_as) is staging:
            del self._shared[staging.shared_as]

    def _joins(self, command: m.Stage, staging: _Staging, hashes: list[bytes]) -> bool:
        """Return whether another staging brings, or has brought, the same pages, and answers for this one, too."""
        staging.shared_as = hashes[0], hashes[-1], frozenset(command.trailing.items())
        other = self._shared.setdefault(staging.shared_as, staging)
        if other is staging:
            return False
        self._stagings[command.work] = other
        other.works |= staging.works
        staging.works = {}  # the other one answers
        if other.staged is not None:
            self._answer(other.answer(command.work))
        return True

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _stage(self, command: m.Stage, staging: _Staging) -> None:
        """Look a prompt up, fetch what is stored if that is sooner than computing it, and answer with the end."""
        hashes = split_hashes(command.hashes)
        request = timeline.Request(command.request_id, command.traceparent)
        num_pages = 0
        asked = staging.works[command.work]
        asked.num_pages, asked.reasons = len(hashes), noted_here()
        try:
            sources, _ = await self._look_up(command, hashes, request)
            staging.held = self._client.fetcher.hold(sources)
            staging.num_pages = len(sources)
            if not staging.is_wanted:
                pass
            elif not sources:
                self._order.computes(len(hashes), command.saved_s, time.monotonic())
            elif self._joins(command, staging, hashes[: len(sources)]):
                pass
            else:
                staging.reasons, found_s = noted_here(), time.monotonic()
                what = hashes[: len(sources)], sources, command.trailing, command.saved_s, request, found_s
                num_pages = await self._fetch(staging, _Prompt(*what, found_s + self._config.fetch_timeout_s))
        finally:
            staging.task = None
            if staging.is_wanted and num_pages:
                if staging.held is not None and staging.code is None:  # it is restored: nothing of it lies there
                    staging.held.let_go()
                elif staging.held is not None:
                    staging.held.end_filling()
                self._turns.end(staging)
                where = staging.offset or 0, staging.code, staging.sides
                staging.staged = m.Staged(0, num_pages, staging.num_pages, "", *where)
                if num_pages < staging.num_pages:  # another fetch may bring more
                    self._share_no_more(staging)
            else:
                self._forget(staging)
            timeline.fetched(request)
            for work in staging.works:
                self._answer(staging.answer(work))

    async def _look_up(
        self, command: m.Stage, hashes: list[bytes], request: timeline.Request
    ) -> tuple[list[PageSource], Usable]:
        """Return where the pages are that are to be served, and, if side pools are needed, which runs can be used."""
        started_s = time.monotonic()
        sources: list[PageSource] = []
        usable = Usable((), {})
        with counted("lookup"):
            sources = await self._client.finder.find_pages(hashes, self._config.lookup_timeout_s)
            if command.trailing:
                usable = await asyncio.to_thread(usable_runs, sources, command.trailing)
                usable.stored[KV_POOL] = len(sources)
                sources = sources[: max(usable.lengths, default=0)]
            if not m.is_for_its_end(command.trailing):
                most = len(sources) if command.is_read_ahead else self._most_pages
                served = self._audited(hashes, sources[:most])
                if len(served) < len(sources):
                    sources, usable = served, usable.up_to(len(served))
        metrics.LOOKUP_PAGES.labels("hit").inc(len(sources))
        metrics.LOOKUP_PAGES.labels("miss").inc(len(hashes) - len(sources))
        timeline.add(request, "lookup", started_s, time.monotonic(), pages=len(hashes), found=len(sources))
        return sources, usable

    # Host mode

    async def _read_ahead(self, command: m.Stage) -> None:
        """Look pages up, and begin to read those that are to be fetched."""
        hashes = split_hashes(command.hashes)
        sources: list[PageSource] = []
        reasons = noted_here()
        staged = m.Staged(command.work)
        try:
            request = timeline.Request(command.request_id, command.traceparent)
            sources, usable = await self._look_up(command, hashes, request)
            cost, fetcher = self._client.fetcher.cost(sources), self._client.fetcher
            if self._order.looked_up(hashes, len(sources), cost, command.saved_s, time.monotonic()):
                fetcher.read_ahead(sources, expire_s=self._config.fetch_timeout_s)
                lengths, stored = usable.lengths, usable.stored
                staged = m.Staged(command.work, len(sources), len(sources), lengths=lengths, stored=stored)
            elif sources:
                self._tasks.begin(fetcher.probe(sources))
                note(Reason.SOONER)
                staged = m.Staged(command.work, 0, len(sources))
            else:
                staged = m.Staged(command.work, stored=usable.stored)
        finally:
            reason = shortfall(reasons) if staged.num_pages < len(hashes) else ""
            self._answer(msgspec.structs.replace(staged, reason=reason))

    def fetch(self, command: m.FetchPages) -> None:
        if command.is_idle:
            self._order.engine.clear()
        self._begin(command.work, partial(self._fetch_pages, command))

    async def _fetch_pages(self, command: m.FetchPages, staging: _Staging) -> None:
        """Restore pages to the engine's pool."""
        finder, hashes, began_s = self._client.finder, split_hashes(command.hashes), time.monotonic()
        turn = self._order.turn_of(hashes, began_s, is_first=command.is_first)
        deadline_s = min(command.deadline_s, turn.end_s)
        result = FetchResult()
        reasons = noted_here()
        try:
            with counted("fetch"):
                if finder.is_paused:  # the store keeps failing: do not try, although pages were found
                    miss("fetch", "skipped")
                    return
                sources = await finder.recall(hashes, self._config.lookup_timeout_s)
                result = await self._client.fetcher.fetch(
                    sources,
                    PoolPages(self._pool, command.places[: len(sources)]),
                    max(0.0, deadline_s - time.monotonic()),
                    compute_s=turn.compute_pages_s(len(hashes)) if command.is_divisible else math.inf,
                )
                if sources:
                    finder.fetched(hashes[result.num_pages :], result.failures)
        finally:
            is_whole = result.num_pages == len(hashes)
            if command.is_last or not is_whole:
                self._order.ended(time.monotonic(), is_whole=is_whole)
            result.count(len(hashes), self._geometry.page_bytes)
            self._forget(staging)
            self._answer(m.Staged(command.work, result.num_pages, result.num_pages, shortfall(reasons)))

    def fetch_side(self, command: m.FetchSide) -> None:
        self._begin(command.work, partial(self._fetch_side, command))

    async def _fetch_side(self, command: m.FetchSide, staging: _Staging) -> None:
        """Put those of a side pool's pages into shared memory that come until the deadline."""
        finder, hashes, pool = self._client.finder, split_hashes(command.hashes), command.pool
        come: dict[int, bytearray] = {}  # which threads fill that may outlive this
        reasons = noted_here()
        try:
            with counted("fetch"):
                deadline_s = min(command.deadline_s, self._order.end_s)  # they follow the present prefix
                left_s = deadline_s - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        sources = await finder.recall(hashes, min(left_s, self._config.lookup_timeout_s))
                except TimeoutError as e:
                    finder.fetched(hashes, [e], is_of_sides=True)
                    raise
                await self._side_fetcher.fetch(hashes, sources, pool, self._sides[pool], deadline_s, come)
        finally:
            staging.task = None
            sides = {(pool, page): content for page, content in sorted(come.items())} if staging.is_wanted else {}
            if sides and not self._put_sides(staging, sides):
                miss("fetch", "no_slots")
            reason = shortfall(reasons) if len(come) < len(hashes) else ""
            staged = m.Staged(command.work, 0, len(come), reason)
            if staging.sides is not None:
                staged = msgspec.structs.replace(staged, num_pages=len(sides), sides=staging.sides)
            else:
                self._forget(staging)
            self._answer(staged)

    # Device mode

    async def _fetch(self, staging: _Staging, prompt: _Prompt) -> int:
        """Fetch pages, unless computing them is sooner. Return how many, from the first on, are there."""
        sources, saved_s = prompt.sources, prompt.saved_s
        cost = self._client.fetcher.cost(sources)
        staging.needs_link = cost.transmit_s != 0.0
        parts = span_parts(sources)
        staging.data_names = {part.reader.data_name for part in parts}
        is_coded = self._takes_code and gpu_restores(sources) and not staging.data_names & self._decoded_here
        plan = RegionPlan(parts, staging.held) if is_coded else None
        if plan is not None and plan.num_bytes > self._room.num_bytes:  # a manifest may say so of its cells
            plan = None
        staging.num_bytes = len(sources) * self._geometry.page_bytes if plan is None else plan.num_bytes
        num_ahead = self._turns.pages_ahead if staging.needs_link else 0
        if not self._order.is_fetched(len(sources), num_ahead, cost, saved_s, prompt.found_s):
            self._tasks.begin(self._client.fetcher.probe(sources))
            note(Reason.SOONER)
            return 0
        try:
            await self._turns.wait(staging, prompt.end_s)
        except TimeoutError:
            miss("fetch", "late")
            return 0
        assert staging.offset is not None
        into: Destination
        if staging.held is not None:
            self._client.fetcher.open(staging.held, parts)
        if plan is not None:
            plan = RegionPlan(parts, staging.held)
            self._turns.shrink(staging, plan.num_bytes)
            into = CodedRegion(self._arena, staging.offset, plan)
        else:
            views = region_views(self._arena, staging.offset, self._geometry, len(sources))
            by_page = [x.view(len(x), len(sources), -1, *x.shape[2:]).permute(1, 2, 0, 3, 4) for x in views]
            into = PoolPages(StridedPages(by_page), range(len(sources)))
        compute_s = self._order.compute_s(len(sources), saved_s, time.monotonic())
        if compute_s is None or m.is_for_its_end(prompt.trailing):
            compute_s = math.inf
        num_pages = await self._with_sides(staging, prompt, self._restore(staging, prompt, into, compute_s))
        if isinstance(into, CodedRegion) and num_pages and not self._put_tables(staging, into, num_pages):
            miss("fetch", "no_slots")
            return 0
        if num_pages == len(sources) and not num_ahead:
            if cost.seconds is None:  # this fetch has measured it; what is in memory now was not there
                cost = self._client.fetcher.cost(sources)
                cost = cost if cost.transmit_s or not staging.needs_link else Cost(None, None)
            if cost.seconds is not None:
                self._order.landed(time.monotonic(), prompt.found_s + cost.seconds)
        return num_pages

    async def _restore(self, staging: _Staging, prompt: _Prompt, into: Destination, compute_s: float) -> int:
        """Restore pages into the staging's region. Return how many, from the first on, are there."""
        result = FetchResult()
        with counted("fetch"):
            result = await self._client.fetcher.fetch(
                prompt.sources,
                into,
                max(0.0, prompt.end_s - time.monotonic()),
                request=prompt.request,
                on_requested=partial(self._turns.link_has_room, staging),
                compute_s=compute_s,
                held=staging.held,
            )
            self._client.finder.fetched(prompt.hashes[result.num_pages :], result.failures)
        result.count(len(prompt.sources), self._geometry.page_bytes)
        return result.num_pages

    async def _with_sides(self, staging: _Staging, prompt: _Prompt, restoring: Awaitable[int]) -> int:
        """Fetch side pages while pages are restored, and put them into shared memory. Return how many pages, from the
        first on, are there with all that they need."""
        trailing, sources = prompt.trailing, prompt.sources
        if not trailing:
            return await restoring
        num_pages, sides = await asyncio.gather(restoring, self._fetch_sides(prompt, len(sources)))
        is_for_its_end = m.is_for_its_end(trailing)
        if num_pages < len(sources) and is_for_its_end:
            num_pages = max(usable_runs(sources[:num_pages], trailing).lengths, default=0)
            sides = await self._fetch_sides(prompt, num_pages)
        missing = [
            page
            for pool, first in _firsts(trailing, num_pages)
            for page in range(first, num_pages)
            if (pool, page) not in sides
        ]
        if missing:
            num_pages = 0 if is_for_its_end else min(missing)
        sides = {key: content for key, content in sides.items() if key[1] < num_pages}
        if not num_pages:
            return 0
        if not self._put_sides(staging, sides):
            miss("fetch", "no_slots")
            return 0
        return num_pages

    async def _fetch_sides(self, prompt: _Prompt, num_pages: int) -> dict[SideKey, bytearray]:
        """Return those side pages that come, of all that the first pages need at their end."""
        come: dict[SideKey, bytearray] = {}
        for pool, first in _firsts(prompt.trailing, num_pages):
            pages: dict[int, bytearray] = {}  # which threads fill that may outlive this
            run = slice(first, num_pages)
            with counted("fetch"):
                what = prompt.hashes[run], prompt.sources[run], pool, self._sides[pool]
                await self._side_fetcher.fetch(*what, prompt.end_s, pages)
            come |= {(pool, first + page): pages[page] for page in sorted(pages)}
        return come

    def _put_sides(self, staging: _Staging, sides: Mapping[SideKey, bytearray]) -> bool:
        """Put side pages into shared memory. Return whether there is room for them."""
        num_bytes = sum(map(len, sides.values()))
        place = self._room.allocate(num_bytes, 0) if num_bytes <= self._room.num_bytes else None
        if place is None:
            return False
        into, begin = self._arena.buffer(place, num_bytes), 0
        for content in sides.values():
            into[begin : (begin := begin + len(content))] = content
        staging.sides = m.SidePages(place, tuple(sides))
        return True

    def _put_tables(self, staging: _Staging, region: CodedRegion, num_pages: int) -> bool:
        """Put the tables of coded cells into shared memory. Return whether there is room for them."""
        num_cells, tables = region.tables(num_pages)
        fits = len(tables) <= self._room.num_bytes  # those of a whole span, all of whose tokens are exact, may not
        place = self._room.allocate(len(tables), 0) if fits else None
        if place is None:
            return False
        self._arena.buffer(place, len(tables))[:] = tables
        staging.code = m.CodedCells(place, len(tables), num_cells)
        return True


def _firsts(trailing: Mapping[str, int], num_pages: int) -> list[tuple[str, int]]:
    """Return for each side pool the first page of a run that needs its own there."""
    return [(pool, max(0, num_pages - number) if number else 0) for pool, number in trailing.items()]
