"""The stored prefixes of waiting requests, from their arrival until they have computed. Runs on the scheduler's thread.

    Parked ---> Admissible <---> HeldBack      Admissible ---> Admitted ---> Loading ---> over
       |            |               |
       +------------+---------------+---> forgotten

* `Parked`: its pages are staged, or another prefix brings those before them, or both. Those are staged for the other
  one, which loads them and puts them into the tree. If the other one is gone before, the request arrives again.
* `Admissible`: the pages that all ranks have wait for its admission.
* `HeldBack`: the pool has no room for them. SGLang, which serves requests in their order, would let all others wait
  behind it. It could wait for ever, so only a few may go ahead.
* `Admitted`: SGLang has given it slots. `Loading`: its batch has begun. Others wait for its pages until that ends.

A request may leave at any time before: it is aborted, or the tree is emptied. What the data plane reports goes over the
board, so that all ranks unpark a request in the same step, with equal pages.
"""

from __future__ import annotations

import math
import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.engine import DataPlane
from sgl_kvfetch.keys import hash_bytes
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.device.waiting_queue import wanted_tokens
from sgl_kvfetch.plugin.prefill import PrefillSpeed
from sgl_kvfetch.protocol import StagedValues
from sgl_kvfetch.protocol.messages import is_for_its_end
from sgl_kvfetch.reasons import Reason

_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Ticket:
    """One piece of work, whose result is a number. ``serial``: in the order of opening."""

    column: int
    serial: int
    on_end: Callable[[int], None] = field(compare=False)
    as_a_whole: bool


class Board:
    """Collects the results of all work under way. A result is a number: how many pages are there, from the first on. Of
    several ranks, the least counts; of work that is of use as a whole alone, 0 counts if they differ.

    Tickets are opened and closed on the scheduler's thread, in the same order on every rank. Reports come from any
    thread. The cost of a step grows only with the number of new reports. With several ranks, each step with an open
    ticket also takes one collective, on a matrix with one column per piece of work.
    """

    def __init__(self, agree: Callable[[torch.Tensor], None] | None) -> None:
        """``agree`` replaces a tensor by its minimum over all ranks, in place; None for a single rank."""
        self._agree = agree
        self._reports: deque[tuple[Ticket, int]] = deque()
        self._open: dict[int, Ticket] = {}  # by column
        self._free: list[int] = []
        self._matrix = torch.empty((3, 0), dtype=torch.int64)  # 1 if it was reported, the result, and minus the result
        self._serial = 0

    def open_ticket(self, on_end: Callable[[int], None], *, as_a_whole: bool = False) -> Ticket:
        """Open a ticket. Once every rank has reported, ``step`` calls ``on_end`` with the least result, or with 0 if
        the results differ and are of use ``as_a_whole``."""
        if not self._free:
            size = self._matrix.shape[1]
            more = size or _COLUMNS
            self._free = list(range(size + more - 1, size - 1, -1))
            self._matrix = torch.cat([self._matrix, torch.zeros((3, more), dtype=torch.int64)], dim=1)
        self._serial += 1
        ticket = Ticket(self._free.pop(), self._serial, on_end, as_a_whole)
        self._open[ticket.column] = ticket
        return ticket

    def close_ticket(self, ticket: Ticket) -> None:
        """Close a ticket. Later reports for it are ignored."""
        del self._open[ticket.column]
        self._matrix[:, ticket.column] = 0
        self._free.append(ticket.column)

    def report(self, ticket: Ticket, num_pages: int) -> None:
        """Report the result of a ticket's work, exactly once. Any thread may call this."""
        self._reports.append((ticket, num_pages))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and call their ``on_end`` in the order of opening."""
        if not self._open:
            self._reports.clear()
            return
        fresh: list[tuple[Ticket, int]] = []
        for _ in range(len(self._reports)):
            ticket, num_pages = self._reports.popleft()
            if self._open.get(ticket.column) is ticket:
                fresh.append((ticket, num_pages))
        if self._agree is not None:
            fresh = self._agreed(fresh, self._agree)
        fresh.sort(key=lambda entry: entry[0].serial)
        for ticket, _ in fresh:
            self.close_ticket(ticket)
        for ticket, num_pages in fresh:
            ticket.on_end(num_pages)

    def _agreed(
        self, fresh: list[tuple[Ticket, int]], agree: Callable[[torch.Tensor], None]
    ) -> list[tuple[Ticket, int]]:
        for ticket, num_pages in fresh:
            self._matrix[:, ticket.column] = torch.tensor([1, num_pages, -num_pages])
        least = self._matrix.clone()
        agree(least)
        agreed = []
        for column in torch.nonzero(least[0]).flatten().tolist():  # on which all ranks have reported
            _, fewest, most = least[:, column].abs().tolist()
            ticket = self._open[column]
            agreed.append((ticket, 0 if ticket.as_a_whole and fewest != most else fewest))
        return agreed

    def clear(self) -> None:
        """Close all tickets."""
        for column in sorted(self._open):
            self.close_ticket(self._open[column])
        self._reports.clear()


_LOST = (Reason.CORRUPT, Reason.FORMAT, Reason.MISSING)  # what was broken is deleted, with the pages beside it
_MOST_AHEAD = 32  # requests that may leave the queue while another one is held back. No clock: ranks decide alike


# What a parked request waits for: this rank's result for its own pages, or the last page that another prefix brings.
_Awaited = Future[StagedValues] | str
_NOTHING = StagedValues(0, 0, torch.empty(0, dtype=torch.uint8))


@dataclass(frozen=True, slots=True)
class Parked:
    """``values``: those of its pages that all ranks have, once they agree."""

    awaits: frozenset[_Awaited]
    values: StagedValues = _NOTHING


@dataclass(frozen=True, slots=True)
class Admissible:
    """``held_since``: how many requests had left the queue when the request was first held back."""

    values: StagedValues
    held_since: float = math.inf


@dataclass(frozen=True, slots=True)
class HeldBack(Admissible):
    pass


@dataclass(slots=True, eq=False)
class Prefix:
    """A request's pages that are staged for it, if there are any. ``hashes``: theirs. ``work``: the data plane's
    number for them. ``trailing``: as in `messages.Stage`. ``num_before``: the tokens before these pages."""

    req: Any  # SGLang's Req
    hashes: Sequence[str]
    request: timeline.Request
    arrived_s: float
    trailing: Mapping[str, int]
    num_before: int
    state: Parked | Admissible
    work: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    prefix: Prefix


@dataclass(frozen=True, slots=True)
class Loading:
    prefix: Prefix


class Prefixes:
    """Parks requests while their prefixes are staged."""

    def __init__(
        self,
        plane: DataPlane,
        board: Board,
        speed: PrefillSpeed,
        page_size: int,
        threshold_pages: int,
        on_lookup: Callable[[Sequence[str], int], None],
        on_staged: Callable[[StagedValues], None],
    ) -> None:
        """``threshold_pages``: the smallest number of pages that is worth a lookup. ``on_lookup`` is called with looked
        up pages, and how many of them are stored, from the first on. ``on_staged`` is called with each result."""
        self._on_lookup = on_lookup
        self._on_staged = on_staged
        self._plane = plane
        self._board = board
        self._speed = speed
        self._page_size = page_size
        self.threshold_pages = threshold_pages
        self._prefixes: dict[str, Prefix] = {}  # by request id
        self._bringing: dict[str, Prefix] = {}  # by page hash
        self._followers: dict[str, list[Prefix]] = {}  # by the page that they wait for
        self._staged_ones: dict[str, Prefix] = {}  # that wait for their admission, by request id
        self._taken: dict[str, Admitted | Loading] = {}  # by request id
        self._num_left = 0  # requests that have left the queue
        self._orphans: list[Prefix] = []  # whose pages before theirs nobody brings
        self._changed: list[Any] = []  # handles of requests that may be parked or unparked

    # Calls from the scheduler

    def arrive(
        self, req: Any, hashes: Sequence[str], span: Any, *, is_idle: bool, trailing: Mapping[str, int] | None = None
    ) -> None:
        """Begin to stage the pages of a request that waits. ``is_idle``, ``trailing``: as in `messages.Stage`.
        ``span``: the OpenTelemetry ``SpanContext`` of SGLang's span of the request, or None."""
        if not hashes or len(hashes) < self.threshold_pages:
            return
        trailing = trailing or {}
        num_shared = next((i for i, each in enumerate(hashes) if each not in self._bringing), len(hashes))
        if is_for_its_end(trailing):  # the tree will have another request's windows and states for its end alone
            num_shared = 0  # the data plane fetches the same pages once
        before, rest, own = hashes[:num_shared][-1:], hashes[num_shared:], Future[StagedValues]()
        awaits: list[_Awaited] = [*before, own] if rest else [*before]
        num_before = req.prefix_len + num_shared * self._page_size
        what = timeline.arrived(req.rid), time.monotonic(), trailing, num_before
        prefix = Prefix(req, rest, *what, Parked(frozenset(awaits)))
        if span is not None:
            prefix.request.belongs_to(span)
        self._prefixes[req.rid] = prefix
        metrics.PARKED_REQUESTS.inc()
        self._changed.append(req.cache_request_handle)
        for page_hash in before:
            self._followers.setdefault(page_hash, []).append(prefix)
        if rest:
            self._stage(prefix, own, is_idle=is_idle)

    def _stage(self, prefix: Prefix, own: Future[StagedValues], *, is_idle: bool) -> None:
        self._bringing.update(dict.fromkeys(prefix.hashes, prefix))
        as_a_whole = is_for_its_end(prefix.trailing)  # another rank's end has other windows and states
        ticket = self._board.open_ticket(partial(self._agreed, prefix, own), as_a_whole=as_a_whole)
        prefix.work = self._plane.stage(
            hash_bytes(prefix.hashes),
            partial(self._report, own, ticket),
            saved_s=self._speed.saved_s(len(prefix.hashes), self._page_size),
            request=prefix.request,
            is_idle=is_idle,
            trailing=prefix.trailing,
        )

    def has(self, rid: str) -> bool:
        return rid in self._prefixes

    def retain(self, rids: Collection[str]) -> None:
        """Forget requests that are not among these: all that wait."""
        for rid in [rid for rid in self._prefixes if rid not in rids]:
            self.leave(rid)

    def is_parked(self, handle: Any) -> bool:
        prefix = self._prefixes.get(handle.rid)
        return prefix is not None and isinstance(prefix.state, Parked | HeldBack)

    def hold_back(self, free_tokens: Callable[[], float]) -> None:
        """Hold staged requests back that the pool has no room for. ``free_tokens`` returns how much room it has;
        infinite if there is nothing to wait for."""
        if not self._staged_ones:
            return
        free = free_tokens()
        for prefix in self._staged_ones.values():
            state, needed = prefix.state, wanted_tokens(prefix.req, self._page_size) - prefix.num_before
            assert isinstance(state, Admissible)
            since = min(state.held_since, self._num_left)
            is_held = needed >= free and self._num_left - since < _MOST_AHEAD
            if not is_held:
                free, since = free - needed, state.held_since
            if is_held != isinstance(state, HeldBack):
                prefix.state = (HeldBack if is_held else Admissible)(state.values, since)
                self._changed.append(prefix.req.cache_request_handle)

    @property
    def has_held(self) -> bool:
        """Whether a request waits for room in the pool."""
        return any(isinstance(prefix.state, HeldBack) for prefix in self._staged_ones.values())

    def take_changed(self) -> list[Any]:
        """Return the handles of requests whose ``is_parked`` may have changed since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def num_staged(self, rid: str, hashes: Sequence[str]) -> int:
        """Return how many of these pages, from the first on, can be loaded."""
        prefix = self._prefixes.get(rid)
        if prefix is None or not isinstance(prefix.state, Admissible):
            return 0
        staged = prefix.hashes[: prefix.state.values.num_pages]
        if hashes[0] not in staged:
            return 0
        first = staged.index(hashes[0])  # it identifies all pages before it, too
        # Compared one by one: users choose request ids, so this may be another request than the one that arrived.
        num_equal = [*map(operator.eq, hashes, staged[first:]), False].index(False)
        if is_for_its_end(prefix.trailing) and first + num_equal < len(staged):
            return 0
        return num_equal

    def take(self, rid: str, hashes: Sequence[str]) -> tuple[int, StagedValues]:
        """Hand these pages over, all of which are staged, for a request that is admitted: the data plane's number, and
        what they are. Call `begin_loads` next, or `end_load`."""
        prefix = self._prefixes.pop(rid)
        del self._staged_ones[rid]
        assert isinstance(prefix.state, Admissible)
        self.end_load(rid)  # of an earlier request with this id
        self._taken[rid] = Admitted(prefix)
        first = prefix.hashes.index(hashes[0])
        return prefix.work, prefix.state.values.of_pages(range(first, first + len(hashes)), self._page_size)

    def begin_loads(self) -> None:
        """Record that the batch of all who were admitted begins."""
        self._taken = {rid: Loading(taken.prefix) for rid, taken in self._taken.items()}

    def computed(self, reqs: Iterable[Any]) -> None:
        """Record that the requests of a batch have computed."""
        for req in reqs if self._taken else ():
            if isinstance(self._taken.get(req.rid), Loading):
                self.end_load(req.rid)

    def end_load(self, rid: str) -> None:
        """Record that the pages of a request are in the tree, or will not be."""
        if (taken := self._taken.pop(rid, None)) is not None:  # or all have been dropped
            self._orphans += self._bring_no_more(taken.prefix, taken.prefix.hashes)

    def leave(self, rid: str) -> None:
        """Handle a request that no longer waits. What was handed over is not affected."""
        self._num_left += 1
        prefix = self._prefixes.get(rid)
        if prefix is not None:
            if isinstance(prefix.state, Parked):
                self._count(prefix, "aborted")
            self._remove(prefix)

    def landed(self, hashes: Sequence[str]) -> None:
        """Record that pages have joined the tree."""
        for page_hash in hashes:
            self._bringing.pop(page_hash, None)
            for follower in self._followers.pop(page_hash, ()):
                self._end_wait(follower, page_hash, follower.state.values)

    def step(self, wait_s: float = 0.0) -> list[Any]:
        """Take in what the data plane reports within ``wait_s``. Return the requests that must arrive again."""
        self._plane.step(wait_s)
        self._board.step()
        orphans, self._orphans = self._orphans, []
        there = [prefix for prefix in orphans if self._prefixes.get(prefix.req.rid) is prefix]
        for prefix in there:
            self._remove(prefix)
        return [prefix.req for prefix in there]

    def drop_all(self) -> None:
        """End all stagings. Their requests go on without them."""
        self._board.clear()
        for prefix in self._prefixes.values():
            self._changed.append(prefix.req.cache_request_handle)
            if isinstance(prefix.state, Parked):
                self._count(prefix, "flushed")
            if prefix.hashes:
                self._plane.unstage(prefix.work)
        tables: list[Any] = [self._prefixes, self._staged_ones, self._taken, self._bringing, self._followers]
        for each in (*tables, self._orphans):
            each.clear()
        metrics.PARKED_REQUESTS.set(0)

    # Results

    def _report(self, own: Future[StagedValues], ticket: Ticket, staged: StagedValues) -> None:
        own.set_result(staged)
        self._on_staged(staged)
        self._board.report(ticket, staged.num_pages)

    def _agreed(self, prefix: Prefix, own: Future[StagedValues], num_pages: int) -> None:
        """Take in what all ranks have of a prefix. ``own``: what this one has."""
        staged = own.result()
        self._on_lookup(prefix.hashes, 0 if staged.reason in _LOST else staged.num_found)
        if self._prefixes.get(prefix.req.rid) is not prefix:
            return  # its request is gone, and the data plane knows
        values = staged.of_pages(range(num_pages), self._page_size)
        for follower in self._bring_no_more(prefix, prefix.hashes[num_pages:]):
            # It computes: whatever is stored for it has a gap before it.
            self._count(follower, values.end)
            self._remove(follower)
        self._end_wait(prefix, own, values)

    def _end_wait(self, prefix: Prefix, awaited: _Awaited, values: StagedValues) -> None:
        """Unpark a request if it waits for nothing else. ``values``: what all ranks have of its own pages."""
        assert isinstance(prefix.state, Parked)
        prefix.state = Parked(prefix.state.awaits - {awaited}, values)
        if prefix.state.awaits:
            return
        metrics.PARKED_REQUESTS.dec()
        self._changed.append(prefix.req.cache_request_handle)
        self._count(prefix, values.end if prefix.hashes else "landed")
        prefix.req.host_hit_is_storage = True  # for its usage report, if it is loaded
        prefix.state = Admissible(values)
        if values.num_pages:
            self._staged_ones[prefix.req.rid] = prefix
        else:
            self._remove(prefix)

    def _remove(self, prefix: Prefix) -> None:
        """Forget a request. Those that wait for its pages arrive again."""
        del self._prefixes[prefix.req.rid]
        self._staged_ones.pop(prefix.req.rid, None)
        if isinstance(prefix.state, Parked | HeldBack):
            self._changed.append(prefix.req.cache_request_handle)
        if isinstance(prefix.state, Parked):
            metrics.PARKED_REQUESTS.dec()
            for followers in (self._followers.get(each, []) for each in prefix.state.awaits if isinstance(each, str)):
                if prefix in followers:
                    followers.remove(prefix)
        self._orphans += self._bring_no_more(prefix, prefix.hashes)
        if prefix.hashes:
            self._plane.unstage(prefix.work)

    def _bring_no_more(self, prefix: Prefix, hashes: Sequence[str]) -> list[Prefix]:
        """Return those who wait for these pages, which the prefix does not bring."""
        left: list[Prefix] = []
        for page_hash in hashes:
            if self._bringing.get(page_hash) is prefix:
                del self._bringing[page_hash]
                left += self._followers.pop(page_hash, ())
        return left

    def _count(self, prefix: Prefix, end: str) -> None:
        """Count a request that is no longer parked, and record how long it was."""
        metrics.DEVICE_REQUESTS.labels(end).inc()
        values = prefix.state.values
        reason = values.reason or ("cancelled" if end in ("aborted", "flushed") else "")
        if prefix.hashes:
            status.record(prefix.request.id, prefix.hashes, values.num_found, values.num_pages, reason)
        timeline.add(
            prefix.request,
            "parked",
            prefix.arrived_s,
            time.monotonic(),
            end=end,
            reason=reason,
            tokens=values.num_pages * self._page_size,
        )
