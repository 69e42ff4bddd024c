"""Device mode: a prompt's stored pages are staged in shared memory before the engine admits the prompt.

The engine asks once for a prompt (`messages.Stage`), and is told once how many pages are there (`messages.Staged`). It
then copies them into its pool whenever it likes. So it takes part in nothing that happens in between:

    LookingUp ---> Waiting ---> Filling ---> Filled ---> released
        |             |            |
        +-------------+------------+---> nothing is brought

* `LookingUp`: one of the engine's numbers, whose prompt is looked up. If pages are found, and computing is not sooner,
  they wait (`_wait`); if they are those of another staging, the number joins that (`_join`).
* `Waiting`: pages whose turn comes when link and memory have room for them (`_Turns`).
* `Filling`: pages that are fetched, verified and restored into a region of shared memory (`_fill`).
* `Filled`: pages that are there, until the engine has released them.

From `Waiting` on, a `_Staging` has the pages, for all numbers that ask for them. What must hold at any moment, since
the engine may release a number at any moment:

* **Each number is answered once**: at the end of the task that brings its pages (`_settle`), or by its `release`.
* **Memory is freed once**, and not under a fetch: by the task until the pages are ready, by `release` from then on.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import msgspec

from sgl_kvfetch import timeline
from sgl_kvfetch.keys import split_hashes
from sgl_kvfetch.metrics import counted, miss, reasons_here, shortfall
from sgl_kvfetch.plane.choice import Cost, Points
from sgl_kvfetch.plane.coded import CodedRegion, RegionPlan, gpu_restores
from sgl_kvfetch.plane.fetch.fetcher import Destination, FetchResult, PoolPages
from sgl_kvfetch.plane.fetch.finder import StoredPrompts, usable_runs
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.memory_cache import Held
from sgl_kvfetch.protocol import Emit, KVFetchConfig, Room, StridedPages, messages as m
from sgl_kvfetch.protocol.arena import region_views
from sgl_kvfetch.types import KVGeometry, SideKey

_SHARED_TOKENS = 8192  # fetches that share the link have so many tokens in total, at most
_SIDES_S = 1.0  # how long side pages may come after fewer pages than were asked for: the rest is computed
# Shortest first, with ageing: a later fetch overtakes only if it is shorter by more than so many pages per arrival
# since the earlier fetch. So none starves: after num_pages / AGEING_PAGES further arrivals, none can overtake it.
AGEING_PAGES = 8


# The first and the last page, whose hashes identify all between them, and the side pools that are needed.
_Key = tuple[bytes, bytes, frozenset[tuple[str, int]]]


@dataclass(slots=True, eq=False)
class _Asked:
    """What the engine asked for under one number. ``reasons``: why it gets less, as far as no other number shares
    them."""

    work: int
    num_pages: int
    request: timeline.Request
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class LookingUp:
    asked: _Asked
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """``num_bytes``: of the region that the pages need. ``needs_link``: whether not all bytes are in memory. ``rank``:
    the least one's turn comes first. ``turn``: the state that follows."""

    num_pages: int
    num_bytes: int
    needs_link: bool
    rank: tuple[int, int]
    turn: asyncio.Future[Filling]


@dataclass(slots=True, eq=False)
class Filling:
    """The region is at ``offset`` of shared memory. It may shrink."""

    num_pages: int
    num_bytes: int
    needs_link: bool
    offset: int


@dataclass(frozen=True, slots=True)
class Filled:
    """``staged``: the answer, but for its number and reason."""

    staged: m.Staged


@dataclass(slots=True, eq=False)
class _Staging:
    """Pages that are brought for all who ask for them."""

    key: _Key
    num_pages: int
    data_names: set[str]  # the objects that are read
    is_coded: bool
    held: Held  # what memory keeps of the pages
    task: asyncio.Task[None]
    reasons: list[str]  # why the fetch brings less
    ends: ExitStack  # frees whatever the pages take
    asked: dict[int, _Asked]  # by the engine's numbers, until it releases them
    state: Waiting | Filling | Filled


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The pages of a `Stage` that were found at ``found_s``, in time.monotonic(). ``end_s``: when their fetch must
    end."""

    hashes: Sequence[bytes]
    sources: Sequence[PageSource]
    trailing: Mapping[str, int]
    saved_s: Points
    request: timeline.Request
    found_s: float
    end_s: float

    @property
    def key(self) -> _Key:
        return self.hashes[0], self.hashes[-1], frozenset(self.trailing.items())


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
        self._waiting: list[Waiting] = []  # in the order of arrival
        self._filling: set[Filling] = set()  # for which more is fetched
        self._on_link: set[Filling] = set()  # those among them that occupy the link

    @property
    def pages_ahead(self) -> int:
        """How many pages the link is to bring for those that wait or have begun."""
        coming: list[Waiting | Filling] = [*self._waiting, *self._filling]
        return sum(each.num_pages for each in coming if each.needs_link)

    def enter(self, num_pages: int, num_bytes: int, *, needs_link: bool) -> Waiting:
        """Let pages take their place among those that wait. Call `wait` next."""
        rank = 0, 0
        if needs_link:
            self._num_arrived += 1
            rank = num_pages + AGEING_PAGES * self._num_arrived, self._num_arrived
        turn: asyncio.Future[Filling] = asyncio.get_running_loop().create_future()
        waiting = Waiting(num_pages, num_bytes, needs_link, rank, turn)
        self._waiting.append(waiting)
        return waiting

    async def wait(self, waiting: Waiting, deadline_s: float) -> Filling:
        """Wait for the turn, which gives pages their region. Raises TimeoutError."""
        try:
            self._serve()
            async with asyncio.timeout(deadline_s - time.monotonic()):
                return await waiting.turn
        except BaseException:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
                self._serve()
            else:  # the turn came at the same moment
                self.free(waiting.turn.result())
            raise

    def _serve(self) -> None:
        while waiting := [each for each in self._waiting if not each.turn.cancelled()]:
            first = min(waiting, key=lambda each: each.rank)
            num_pages = first.num_pages + sum(each.num_pages for each in self._on_link)
            if first.needs_link and self._on_link and num_pages > self._shared_pages:
                return
            used_bytes = self._used_bytes + first.num_bytes
            if self._used_bytes and first.num_bytes and used_bytes > self._most_bytes:
                return
            offset = self._room.allocate(first.num_bytes, 0)
            if offset is None:
                return
            self._used_bytes = used_bytes
            self._waiting.remove(first)
            filling = Filling(first.num_pages, first.num_bytes, first.needs_link, offset)
            self._filling.add(filling)
            if filling.needs_link:
                self._on_link.add(filling)
            first.turn.set_result(filling)

    def shrink(self, filling: Filling, num_bytes: int) -> None:
        """Free all but the first ``num_bytes`` of a region."""
        self._room.shrink(filling.offset, num_bytes)
        self._used_bytes -= filling.num_bytes - num_bytes
        filling.num_bytes = num_bytes
        self._serve()

    def link_has_room(self, filling: Filling) -> None:
        """Record that the link could serve others beside ``filling``."""
        self._on_link.discard(filling)
        self._serve()

    def end(self, filling: Filling) -> None:
        """Record that nothing more is fetched. The region stays."""
        self._filling.discard(filling)
        self.link_has_room(filling)

    def free(self, filling: Filling) -> None:
        """Free a region, into which nothing more is fetched."""
        self._room.free(filling.offset)
        self._used_bytes -= filling.num_bytes
        self.end(filling)


class Stager:
    """Carries out `messages.Stage`. Belongs to one event loop."""

    def __init__(self, prompts: StoredPrompts, answer: Emit, *, takes_code: bool) -> None:
        """``answer``: as for `Service`. ``takes_code``: as in `messages.Start`."""
        self._prompts, self._answer, self._takes_code = prompts, answer, takes_code
        self._order, self._fetcher, self._geometry = prompts.order, prompts.client.fetcher, prompts.geometry
        self._most_pages = prompts.room.num_bytes // prompts.geometry.page_bytes
        self._works: dict[int, LookingUp | _Staging] = {}  # by the engine's numbers
        self._shared: dict[_Key, _Staging] = {}  # that others may join
        self._decoded_here: set[str] = set()  # objects that the engine could not decode
        self._turns = _Turns(prompts.config, prompts.geometry, prompts.room)

    # Transitions, in their order

    def begin(self, command: m.Stage) -> None:
        request = timeline.Request(command.request_id, command.traceparent)
        asked = _Asked(command.work, len(split_hashes(command.hashes)), request)
        self._works[asked.work] = LookingUp(asked, self._prompts.tasks.begin(self._stage(command)))

    async def _stage(self, command: m.Stage) -> None:
        """Look a prompt up, fetch what is stored if that is sooner than computing it, and answer with the end."""
        mine = self._works[command.work]
        assert isinstance(mine, LookingUp)
        asked, hashes, num_found = mine.asked, split_hashes(command.hashes), 0
        asked.reasons = reasons_here()
        try:
            sources, _ = await self._prompts.find(command, hashes, asked.request, self._most_pages)
            num_found, found_s = len(sources), time.monotonic()
            what = hashes[:num_found], sources, command.trailing, command.saved_s, asked.request
            prompt = _Prompt(*what, found_s, found_s + self._prompts.config.fetch_timeout_s)
            if self._works.get(asked.work) is not mine:
                pass  # the engine has released it
            elif not sources:
                self._order.computes(len(hashes), command.saved_s, found_s)
            elif prompt.key in self._shared:
                self._join(mine, self._shared[prompt.key])
            else:
                cost = self._fetcher.cost(sources)
                needs_link = cost.transmit_s != 0.0
                num_ahead = self._turns.pages_ahead if needs_link else 0
                if self._order.is_fetched(num_found, num_ahead, cost, prompt.saved_s, found_s):
                    mine = self._wait(mine, prompt, needs_link=needs_link)
                    if await self._fill(mine, prompt) == num_found and not num_ahead:
                        self._landed(prompt, cost, needs_link=needs_link)
                else:
                    self._prompts.leave_to_engine(sources)
        finally:
            timeline.fetched(asked.request)
            if isinstance(mine, _Staging):
                self._settle(mine)
            elif self._works.get(asked.work) is mine:  # nothing is brought
                del self._works[asked.work]
                self._tell(asked, m.Staged(asked.work, 0, num_found))

    def _join(self, mine: LookingUp, staging: _Staging) -> None:
        """Leave it to a staging of the same pages to answer."""
        asked = mine.asked
        self._works[asked.work], staging.asked[asked.work] = staging, asked
        if isinstance(staging.state, Filled):
            self._tell(asked, staging.state.staged, staging.reasons)

    def _wait(self, mine: LookingUp, prompt: _Prompt, *, needs_link: bool) -> _Staging:
        """Let the pages of a prompt wait for their turn."""
        sources, num_pages = prompt.sources, len(prompt.sources)
        parts, num_bytes = span_parts(sources), num_pages * self._geometry.page_bytes
        names = {part.reader.data_name for part in parts}
        is_coded = self._takes_code and gpu_restores(sources) and not names & self._decoded_here
        if is_coded and not needs_link:
            self._answer(m.Near(mine.asked.work))
        with ExitStack() as ends:
            held = self._fetcher.hold(sources)
            ends.callback(held.let_go)
            if is_coded:
                coded_bytes = RegionPlan(parts, held).num_bytes
                is_coded = coded_bytes <= self._prompts.room.num_bytes  # a manifest may say so of its cells
                num_bytes = coded_bytes if is_coded else num_bytes
            waiting = self._turns.enter(num_pages, num_bytes, needs_link=needs_link)
            what = mine.task, reasons_here(), ends.pop_all(), {mine.asked.work: mine.asked}
        staging = _Staging(prompt.key, num_pages, names, is_coded, held, *what, waiting)
        self._works[mine.asked.work] = self._shared[prompt.key] = staging
        return staging

    async def _fill(self, staging: _Staging, prompt: _Prompt) -> int:
        """Wait for a turn, and fetch pages into their region. Return how many, from the first on, are there with all
        that they need."""
        assert isinstance(staging.state, Waiting)
        try:
            filling = staging.state = await self._turns.wait(staging.state, prompt.end_s)
        except TimeoutError:
            miss("fetch", "late")
            return 0
        staging.ends.callback(self._turns.free, filling)
        into = self._open(staging, filling, prompt)
        compute_s = self._order.compute_s(staging.num_pages, prompt.saved_s, time.monotonic())
        if compute_s is None or m.is_for_its_end(prompt.trailing):
            compute_s = math.inf
        restoring = self._restore(staging, filling, prompt, into, compute_s)
        num_pages, sides = await self._with_sides(staging, prompt, restoring)
        code = None
        if isinstance(into, CodedRegion) and num_pages:
            num_cells, tables = into.tables(num_pages)
            if (place := self._prompts.put([tables], staging.ends)) is None:
                return 0
            code = m.CodedCells(place, len(tables), num_cells)
        if num_pages and staging.asked:
            self._turns.end(filling)
            if staging.is_coded:
                staging.held.end_filling()
            else:  # it is restored: nothing of it lies there
                staging.held.let_go()
            staged = m.Staged(0, num_pages, staging.num_pages, "", filling.offset, code, sides)
            staging.state = Filled(staged)
        return num_pages

    def _settle(self, staging: _Staging) -> None:
        """Answer all who ask for a staging, whose task ends. Forget it if it brings nothing."""
        staged = m.Staged(0, 0, staging.num_pages)
        if isinstance(staging.state, Filled):
            staged = staging.state.staged
        else:
            staging.ends.close()
            for work in staging.asked:
                del self._works[work]
        if staged.num_pages < staging.num_pages:  # another fetch may bring more
            self._share_no_more(staging)
        for asked in staging.asked.values():
            self._tell(asked, staged, staging.reasons)

    def release(self, command: m.Unstage) -> bool:
        """Free what was staged, or end a staging soon. Return whether there is one with this number."""
        work = command.work
        self._takes_code = self._takes_code and command.takes_code
        state = self._works.pop(work, None)  # None: nothing was brought, or an earlier data plane had it, or host mode
        if isinstance(state, LookingUp):
            self._tell(state.asked, m.Staged(work))
            state.task.cancel()
        elif isinstance(state, _Staging):
            self._release(state, work, is_sound=command.is_sound)
        return state is not None

    def _release(self, staging: _Staging, work: int, *, is_sound: bool) -> None:
        if not is_sound:
            self._decoded_here |= staging.data_names
            for name in staging.data_names:
                self._fetcher.reads.drop_kept(name)
            self._share_no_more(staging)
        asked, is_ready = staging.asked.pop(work), isinstance(staging.state, Filled)
        if not is_ready:
            self._tell(asked, m.Staged(work, 0, staging.num_pages), staging.reasons)
        if not staging.asked:
            self._share_no_more(staging)
            if is_ready:
                staging.ends.close()
            else:
                staging.task.cancel()

    # What they do

    def _tell(self, asked: _Asked, staged: m.Staged, reasons: Sequence[str] = ()) -> None:
        reason = shortfall([*asked.reasons, *reasons]) if staged.num_pages < asked.num_pages else ""
        self._answer(msgspec.structs.replace(staged, work=asked.work, reason=reason))

    def _share_no_more(self, staging: _Staging) -> None:
        if self._shared.get(staging.key) is staging:
            del self._shared[staging.key]

    def _open(self, staging: _Staging, filling: Filling, prompt: _Prompt) -> Destination:
        """Return what restores to a region. It takes no more than it needs, now that memory keeps what it can."""
        parts, arena = span_parts(prompt.sources), self._prompts.arena
        self._fetcher.open(staging.held, parts)
        if staging.is_coded:
            plan = RegionPlan(parts, staging.held)
            self._turns.shrink(filling, plan.num_bytes)
            return CodedRegion(arena, filling.offset, plan)
        views = region_views(arena, filling.offset, self._geometry, filling.num_pages)
        by_page = [x.view(len(x), filling.num_pages, -1, *x.shape[2:]).permute(1, 2, 0, 3, 4) for x in views]
        return PoolPages(StridedPages(by_page), range(filling.num_pages))

    async def _restore(
        self, staging: _Staging, filling: Filling, prompt: _Prompt, into: Destination, compute_s: float
    ) -> int:
        """Restore pages into the staging's region. Return how many, from the first on, are there."""
        result = FetchResult()
        with counted("fetch"):
            result = await self._fetcher.fetch(
                prompt.sources,
                into,
                max(0.0, prompt.end_s - time.monotonic()),
                request=prompt.request,
                on_requested=partial(self._turns.link_has_room, filling),
                compute_s=compute_s,
                held=staging.held,
            )
            if result.is_read:  # else it says nothing of the store
                self._prompts.client.finder.fetched(prompt.hashes[result.num_pages :], result.failures)
        result.count(len(prompt.sources), self._geometry.page_bytes)
        return result.num_pages

    async def _with_sides(
        self, staging: _Staging, prompt: _Prompt, restoring: Awaitable[int]
    ) -> tuple[int, m.SidePages | None]:
        """Fetch side pages while pages are restored, and put them into shared memory. Return how many pages, from the
        first on, are there with all that they need, and where their side pages are."""
        trailing, sources = prompt.trailing, prompt.sources
        if not trailing:
            return await restoring, None
        fetching = asyncio.ensure_future(self._fetch_sides(prompt, len(sources)))
        try:
            num_pages = await restoring
            await asyncio.wait([fetching], timeout=None if num_pages == len(sources) else _SIDES_S)
            sides = fetching.result() if fetching.done() else {}
        finally:
            fetching.cancel()
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
        places = self._prompts.put_sides(sides, staging.ends) if num_pages else None
        return (num_pages if places else 0), places

    async def _fetch_sides(self, prompt: _Prompt, num_pages: int) -> dict[SideKey, bytearray]:
        """Return those side pages that come, of all that the first pages need at their end."""
        come: dict[SideKey, bytearray] = {}
        for pool, first in _firsts(prompt.trailing, num_pages):
            pages: dict[int, bytearray] = {}  # which threads fill that may outlive this
            run = slice(first, num_pages)
            with counted("fetch"):
                what = prompt.hashes[run], prompt.sources[run], pool, self._prompts.side_bytes[pool]
                await self._prompts.sides.fetch(*what, prompt.end_s, pages)
            come |= {(pool, first + page): pages[page] for page in sorted(pages)}
        return come

    def _landed(self, prompt: _Prompt, cost: Cost, *, needs_link: bool) -> None:
        """Record when a fetch that had the link alone has ended. ``cost``: as was estimated before it."""
        if cost.seconds is None:  # this fetch has measured it; what is in memory now was not there
            cost = self._fetcher.cost(prompt.sources)
            cost = cost if cost.transmit_s or not needs_link else Cost(None, None)
        if cost.seconds is not None:
            self._order.landed(time.monotonic(), prompt.found_s + cost.seconds)


def _firsts(trailing: Mapping[str, int], num_pages: int) -> list[tuple[str, int]]:
    """Return for each side pool the first page of a run that needs its own there."""
    return [(pool, max(0, num_pages - number) if number else 0) for pool, number in trailing.items()]
