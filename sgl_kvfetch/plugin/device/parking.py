"""The stored prefixes of waiting requests, from their arrival until they are loaded. Runs on the scheduler's thread.

A request is parked while its pages are staged, and while another request brings pages before them: those are staged for
the other one, which loads them and puts them into the tree. If the other one is gone before, the request arrives again.
It may leave at any time: it is aborted, or the tree is emptied. What the data plane reports goes over the board, so
that all ranks unpark a request in the same step, with equal pages.

A staged request is held back while the pool has no room for it, because SGLang, which serves requests in their order,
would let all others wait behind it. It could wait for ever, so only a few may go ahead.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sgl_kvfetch import metrics, timeline
from sgl_kvfetch.keys import hash_bytes
from sgl_kvfetch.plane import DataPlane, StagedValues
from sgl_kvfetch.plane.protocol import is_for_its_end
from sgl_kvfetch.plugin import status
from sgl_kvfetch.plugin.device.waiting_queue import wanted_tokens
from sgl_kvfetch.plugin.prefill import PrefillSpeed
from sgl_kvfetch.reasons import Reason

_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Ticket:
    """One piece of work, whose result is a number. ``serial`` tells it from earlier work in the same column."""

    column: int
    serial: int


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
        self._serials: list[int] = []
        self._free: list[int] = []
        self._matrix = torch.empty((3, 0), dtype=torch.int64)  # 1 if it was reported, the result, and minus the result
        self._as_a_whole: set[int] = set()  # columns
        self._ends: dict[Ticket, Callable[[int], None]] = {}
        self._serial = 0

    @property
    def num_open(self) -> int:
        return len(self._ends)

    def open_ticket(self, on_end: Callable[[int], None], *, as_a_whole: bool = False) -> Ticket:
        """Open a ticket. Once every rank has reported, ``step`` calls ``on_end`` with the least result, or with 0 if
        the results differ and are of use ``as_a_whole``."""
        if not self._free:
            self._grow()
        self._serial += 1
        ticket = Ticket(self._free.pop(), self._serial)
        self._serials[ticket.column] = ticket.serial
        self._ends[ticket] = on_end
        if as_a_whole:
            self._as_a_whole.add(ticket.column)
        return ticket

    def _grow(self) -> None:
        size = len(self._serials)
        more = size or _COLUMNS
        self._serials += [0] * more
        self._free = list(range(size + more - 1, size - 1, -1))
        self._matrix = torch.cat([self._matrix, torch.zeros((3, more), dtype=torch.int64)], dim=1)

    def close_ticket(self, ticket: Ticket) -> Callable[[int], None]:
        """Close a ticket and return its ``on_end``. Later reports for it are ignored."""
        on_end = self._ends.pop(ticket)
        self._serials[ticket.column] = 0
        self._matrix[:, ticket.column] = 0
        self._as_a_whole.discard(ticket.column)
        self._free.append(ticket.column)
        return on_end

    def report(self, ticket: Ticket, num_pages: int) -> None:
        """Report the result of a ticket's work, exactly once. Any thread may call this."""
        self._reports.append((ticket, num_pages))

    def step(self) -> None:
        """Close the tickets that every rank has reported on, and call their ``on_end`` in the order of opening."""
        if not self._ends:
            self._reports.clear()
            return
        fresh: list[tuple[Ticket, int]] = []
        for _ in range(len(self._reports)):
            ticket, num_pages = self._reports.popleft()
            if self._serials[ticket.column] == ticket.serial:
                fresh.append((ticket, num_pages))
        if self._agree is not None:
            fresh = self._agreed(fresh, self._agree)
        fresh.sort(key=lambda entry: entry[0].serial)
        for on_end, num_pages in [(self.close_ticket(ticket), num_pages) for ticket, num_pages in fresh]:
            on_end(num_pages)

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
            num_pages = 0 if column in self._as_a_whole and fewest != most else fewest
            agreed.append((Ticket(column, self._serials[column]), num_pages))
        return agreed

    def clear(self) -> None:
        """Close all tickets."""
        for ticket in sorted(self._ends, key=lambda ticket: ticket.column):
            self.close_ticket(ticket)
        self._reports.clear()


_LOST = (Reason.CORRUPT, Reason.FORMAT, Reason.MISSING)  # what was broken is deleted, with the pages beside it
_MOST_AHEAD = 32  # requests that may leave the queue while another one is held back. No clock: ranks decide alike


@dataclass(slots=True, eq=False)
class Prefix:
    """A request's pages that are staged for it. ``hashes``: theirs. ``work``: the data plane's number; None if there
    are no such pages. ``staged``: what this rank has; once the ranks agree, what all of them have, and nothing of what
    this one has beyond.

    ``trailing``: as in `protocol.Stage`. ``leader`` brings the pages before these, up to ``awaited``. ``num_before``:
    the tokens before these pages.
    ``held_since``: how many requests had left the queue when the request was first held back; None before.
    """

    req: Any  # SGLang's Req
    hashes: Sequence[str]
    request: timeline.Request
    arrived_s: float
    work: int | None = None
    is_staging: bool = False
    staged: StagedValues | None = None
    trailing: Mapping[str, int] = field(default_factory=dict)
    leader: Prefix | None = None
    awaited: str = ""
    followers: list[Prefix] = field(default_factory=list)
    num_before: int = 0
    is_held: bool = False
    held_since: int | None = None

    @property
    def is_parked(self) -> bool:
        return self.is_staging or self.leader is not None

    @property
    def num_pages(self) -> int:
        """How many pages all ranks have, from the first on; 0 until they agree."""
        return 0 if self.staged is None or self.is_staging else self.staged.num_pages

    def num_needed(self, page_size: int) -> int:
        """Return how many tokens of the pool SGLang wants to have free to admit the request."""
        return wanted_tokens(self.req, page_size) - self.num_before

    def first_page(self, page_hash: str) -> int | None:
        """Return the index of a page if it is staged. Its hash identifies all pages before it, too."""
        return next((i for i in range(self.num_pages) if self.hashes[i] == page_hash), None)


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
        self._staged_ones: dict[str, Prefix] = {}  # that wait for their admission, by request id
        self._num_left = 0  # requests that have left the queue
        self._orphans: list[Prefix] = []  # their leaders are gone
        self._changed: list[Any] = []  # handles of requests that may be parked or unparked
        self._num_parked = self._num_reported = 0

    # Calls from the scheduler

    def arrive(
        self, req: Any, hashes: Sequence[str], span: Any, *, is_idle: bool, trailing: Mapping[str, int] | None = None
    ) -> None:
        """Begin to stage the pages of a request that waits. ``is_idle``, ``trailing``: as in `protocol.Stage`.
        ``span``: the OpenTelemetry ``SpanContext`` of SGLang's span of the request, or None."""
        if len(hashes) < self.threshold_pages:
            return
        trailing = trailing or {}
        num_shared = next((i for i, each in enumerate(hashes) if each not in self._bringing), len(hashes))
        if is_for_its_end(trailing):  # the tree will have another request's windows and states for its end alone
            num_shared = 0  # the data plane fetches the same pages once
        prefix = Prefix(req, hashes[num_shared:], timeline.arrived(req.rid), time.monotonic())
        prefix.trailing = trailing
        prefix.num_before = req.prefix_len + num_shared * self._page_size
        if span is not None:
            prefix.request.belongs_to(span)
        self._prefixes[req.rid] = prefix
        self._num_parked += 1
        self._changed.append(req.cache_request_handle)
        if num_shared:
            prefix.awaited = hashes[num_shared - 1]
            prefix.leader = self._bringing[prefix.awaited]
            prefix.leader.followers.append(prefix)
        if prefix.hashes:
            self._stage(prefix, is_idle=is_idle)

    def _stage(self, prefix: Prefix, *, is_idle: bool) -> None:
        prefix.is_staging = True
        self._bringing.update(dict.fromkeys(prefix.hashes, prefix))
        as_a_whole = is_for_its_end(prefix.trailing)  # another rank's end has other windows and states
        ticket = self._board.open_ticket(partial(self._staged, prefix), as_a_whole=as_a_whole)
        prefix.work = self._plane.stage(
            hash_bytes(prefix.hashes),
            partial(self._report, prefix, ticket),
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
        return prefix is not None and (prefix.is_parked or prefix.is_held)

    def hold_back(self, free_tokens: Callable[[], int | None]) -> None:
        """Hold staged requests back that the pool has no room for. ``free_tokens`` returns how much room it has; None
        if there is nothing to wait for."""
        if not self._staged_ones:
            return
        free = free_tokens()
        for prefix in self._staged_ones.values():
            is_held = False
            if free is not None:
                needed = prefix.num_needed(self._page_size)
                since = self._num_left if prefix.held_since is None else prefix.held_since
                is_held = needed >= free and self._num_left - since < _MOST_AHEAD
                if is_held:
                    prefix.held_since = since
                else:
                    free -= needed
            if is_held != prefix.is_held:
                prefix.is_held = is_held
                self._changed.append(prefix.req.cache_request_handle)

    @property
    def has_held(self) -> bool:
        """Whether a request waits for room in the pool."""
        return any(prefix.is_held for prefix in self._staged_ones.values())

    def take_changed(self) -> list[Any]:
        """Return the handles of requests whose ``is_parked`` may have changed since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def num_staged(self, rid: str, hashes: Sequence[str]) -> int:
        """Return how many of these pages, from the first on, can be loaded."""
        prefix = self._prefixes.get(rid)
        first = None if prefix is None or prefix.is_parked else prefix.first_page(hashes[0])
        if prefix is None or first is None:
            return 0
        # Compared one by one: users choose request ids, so this may be another request than the one that arrived.
        are_equal = [*map(operator.eq, hashes, prefix.hashes[first : prefix.num_pages]), False]
        num_equal = are_equal.index(False)
        if is_for_its_end(prefix.trailing) and first + num_equal < prefix.num_pages:
            return 0
        return num_equal

    def take(self, rid: str) -> Prefix:
        """Hand over what was staged for a request that is admitted. Call `loaded` when it has computed."""
        self._staged_ones.pop(rid, None)
        return self._prefixes.pop(rid)

    def leave(self, rid: str) -> None:
        """Handle a request that no longer waits. What was handed over is not affected."""
        self._num_left += 1
        prefix = self._prefixes.get(rid)
        if prefix is not None:
            if prefix.is_parked:
                self._count(prefix, "aborted")
            self._remove(prefix)

    def landed(self, hashes: Sequence[str]) -> None:
        """Note that pages have joined the tree."""
        for page_hash in hashes:
            leader = self._bringing.pop(page_hash, None)
            for follower in [] if leader is None else leader.followers[:]:
                if follower.awaited == page_hash:
                    self._end_wait(follower, is_staging=follower.is_staging, leader=None)

    def loaded(self, prefix: Prefix) -> None:
        """Note that a request that was loaded has computed: its pages are in the tree, or will not be."""
        self._bring_no_more(prefix, prefix.hashes)
        self._orphans += prefix.followers

    def step(self) -> list[Any]:
        """Take in what the data plane has reported. Return the requests that must arrive again."""
        self._plane.step()
        self._board.step()
        orphans, self._orphans = self._orphans, []
        there = [prefix for prefix in orphans if self._prefixes.get(prefix.req.rid) is prefix]
        for prefix in there:
            self._remove(prefix)
        if self._num_parked != self._num_reported:
            self._num_reported = self._num_parked
            metrics.PARKED_REQUESTS.set(self._num_parked)
        return [prefix.req for prefix in there]

    def drop_all(self) -> None:
        """End all stagings. Their requests go on without them."""
        self._board.clear()
        for prefix in self._prefixes.values():
            self._changed.append(prefix.req.cache_request_handle)
            if prefix.is_parked:
                self._count(prefix, "flushed")
            if prefix.work is not None:
                self._plane.unstage(prefix.work)
        self._prefixes.clear()
        self._staged_ones.clear()
        self._bringing.clear()
        self._orphans.clear()
        self._num_parked = 0

    # Results

    def _report(self, prefix: Prefix, ticket: Ticket, staged: StagedValues) -> None:
        prefix.staged = staged
        self._on_staged(staged)
        self._board.report(ticket, staged.num_pages)

    def _staged(self, prefix: Prefix, num_pages: int) -> None:
        """Take in what all ranks have of a prefix."""
        assert prefix.staged is not None
        staged = prefix.staged
        self._on_lookup(prefix.hashes, 0 if staged.reason in _LOST else staged.num_found)
        if self._prefixes.get(prefix.req.rid) is not prefix:
            return  # its request is gone, and the data plane knows
        prefix.staged = staged.of_pages(range(num_pages), self._page_size)
        self._bring_no_more(prefix, prefix.hashes[num_pages:])
        for follower in [each for each in prefix.followers if each.awaited not in self._bringing]:
            # It computes: whatever is stored for it has a gap before it.
            self._count(follower, prefix.staged.end)
            self._remove(follower)
        self._end_wait(prefix, is_staging=False, leader=prefix.leader)

    def _end_wait(self, prefix: Prefix, *, is_staging: bool, leader: Prefix | None) -> None:
        """Unpark a request if it waits for neither its pages nor a leader."""
        prefix.is_staging = is_staging
        if leader is None and prefix.leader is not None:
            prefix.leader.followers.remove(prefix)
            prefix.leader = None
        if prefix.is_parked:
            return
        self._num_parked -= 1
        self._changed.append(prefix.req.cache_request_handle)
        self._count(prefix, "landed" if prefix.staged is None else prefix.staged.end)
        prefix.req.host_hit_is_storage = True  # for its usage report, if it is loaded
        if prefix.num_pages:
            self._staged_ones[prefix.req.rid] = prefix
        else:
            self._remove(prefix)

    def _remove(self, prefix: Prefix) -> None:
        """Forget a request. Those that wait for its pages arrive again."""
        del self._prefixes[prefix.req.rid]
        self._staged_ones.pop(prefix.req.rid, None)
        if prefix.is_held:
            self._changed.append(prefix.req.cache_request_handle)
        if prefix.is_parked:
            self._num_parked -= 1
            self._changed.append(prefix.req.cache_request_handle)
        if prefix.leader is not None:
            prefix.leader.followers.remove(prefix)
        self._bring_no_more(prefix, prefix.hashes)
        self._orphans += prefix.followers
        if prefix.work is not None:
            self._plane.unstage(prefix.work)

    def _bring_no_more(self, prefix: Prefix, hashes: Sequence[str]) -> None:
        for page_hash in hashes:
            if self._bringing.get(page_hash) is prefix:
                del self._bringing[page_hash]

    def _count(self, prefix: Prefix, end: str) -> None:
        """Count a request that is no longer parked, and record how long it was."""
        metrics.DEVICE_REQUESTS.labels(end).inc()
        reason = "cancelled" if end in ("aborted", "flushed") else ""
        num_found = prefix.num_pages
        if prefix.staged is not None:
            reason, num_found = prefix.staged.reason, prefix.staged.num_found
        if prefix.hashes:
            status.note(prefix.request.id, prefix.hashes, num_found, prefix.num_pages, reason)
        timeline.add(
            prefix.request,
            "parked",
            prefix.arrived_s,
            time.monotonic(),
            end=end,
            reason=reason,
            tokens=prefix.num_pages * self._page_size,
        )
