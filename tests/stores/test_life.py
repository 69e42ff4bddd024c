"""A store's life as a state machine: segments are written, found, pinned and replaced, expire, lose levels and go."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from harness.small_segments import FOLDER as SMALL_FOLDER, expiring, make_segment, page_hashes, parts, put_segment
from sgl_kvfetch.codec import Manifest, decode_manifest
from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores import PINS, AdminStore, Pin, decode_pin, object_digest
from sgl_kvfetch.stores.notes import put_pin
from sgl_kvfetch.stores.upkeep import plan_sweep, sweep_segments
from tests.directory.conftest import rebuild
from tests.directory.test_dropped_levels import FOLDER, WHOLE, chain
from tests.segments import names
from tests.stores.conformance import failing
from tests.stores.conftest import opened

T = TypeVar("T")
Opened = Callable[[Path], AbstractAsyncContextManager[AdminStore]]
NUMBERS = st.integers(0, 8)  # of segments, of which six have room
CAPACITY = 6 * WHOLE
BOUNDED = "bounded", "served"
TIMES_S = None, 1000, 3000  # to live: long enough for what has expired to be older than a write takes
MANIFESTS = {chain(number).manifest.key.manifest_name: number for number in range(9)}
KEYS = {chain(number).manifest.key: number for number in range(9)}
AGE_S = 1e9  # what is put has the real time, and is not left behind when the test's clock has gone on


def pin_of(number: int) -> Pin:
    return Pin("", 1, b"".join(chain(number).manifest.page_hashes))


class Life(RuleBasedStateMachine):
    """``expires``: what was written, and stays until it has expired or has to go. ``order``: those of which the store
    knows which was used first, in a directory."""

    kind: str
    opened: Opened
    clock: list[float]

    def __init__(self) -> None:
        super().__init__()
        self.is_bounded, self.is_served = self.kind in BOUNDED, self.kind == "served"
        self.is_directory = not self.kind.startswith("bucket")
        self.clock[0] = 0.0
        self.folder = Path(tempfile.mkdtemp())
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()
        self.store = self.run(self.stack.enter_async_context(type(self).opened(self.folder)))
        self.expires: dict[int, int | None] = {}
        self.lost: dict[int, int] = {}  # levels
        self.order: list[int] = []
        self.pins: set[int] = set()

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        self.clock[0] += 0.001  # nothing is used at the same time, and nothing expires within a rule
        return self.runner.run(call)

    def has_expired(self, number: int) -> bool:
        expires = self.expires[number]
        return expires is not None and expires <= time.time()

    def live(self) -> set[int]:
        return {number for number in self.expires if not self.has_expired(number)}

    def stored(self) -> set[int]:
        return {MANIFESTS[name] for name in self.run(names(self.store)) if name in MANIFESTS}

    def manifest(self, number: int) -> Manifest:
        content = self.run(self.store.peek(chain(number).manifest.key.manifest_name))
        assert content is not None
        return decode_manifest(content)

    def note_use(self, number: int) -> None:
        self.order = [*(other for other in self.order if other != number), number]

    def forget(self, number: int) -> None:
        del self.expires[number]
        self.lost.pop(number, None)
        self.order = [other for other in self.order if other != number]

    def require_right_ones(self, gone: set[int], drop_levels: int, keeps: int | None = None) -> None:
        """Of what lives, those that were used longest ago go first, and pinned ones when there are no others, but not
        ``keeps``, which is being written."""
        unpinned = self.live() - self.pins - {keeps}
        known = [number for number in self.order if number in unpinned]
        if self.is_directory:
            assert {*known[: len(gone & {*known})]} == gone & {*known}
        assert keeps not in gone
        assert gone <= unpinned or unpinned <= gone
        if gone and not self.is_served:  # first, others lost as many levels as they may
            assert all(self.manifest(number).variants[0].num_dropped >= drop_levels for number in unpinned - gone)

    def see_what_went(self, keeps: int | None = None) -> None:
        """Look what a write has made room by."""
        gone = self.live() - self.stored()
        assert self.is_bounded or not gone
        self.require_right_ones(gone, 1, keeps)
        for number in gone:
            self.forget(number)
        if isinstance(self.store, LocalStore) and self.is_bounded:
            assert self.run(self.store.usage()).stored_bytes <= CAPACITY
            for number in self.live():
                lost = self.manifest(number).variants[0].num_dropped
                assert lost == self.lost[number] or (lost == 1 and number not in self.pins)
                self.lost[number] = lost

    @initialize(times_s=st.tuples(*[st.sampled_from(TIMES_S)] * 4), pins=st.sets(st.integers(0, 3), max_size=2))
    def begin(self, times_s: Sequence[int | None], pins: set[int]) -> None:
        for number, ttl_s in enumerate(times_s):
            self.write(number, ttl_s)
        for number in pins:
            self.pin(number)

    @rule(number=NUMBERS, ttl_s=st.sampled_from(TIMES_S))
    def write(self, number: int, ttl_s: int | None) -> None:
        expires = None if ttl_s is None else int(time.time()) + ttl_s
        had_expired = {*self.expires} - self.live() - {number}
        self.run(commit_segment(self.store, expiring(chain(number), expires)))
        if self.is_directory:  # a write deletes what has expired
            assert not had_expired & self.stored()
            for other in had_expired:
                self.forget(other)
        self.expires[number], self.lost[number] = expires, 0
        self.see_what_went(number)
        self.note_use(number)

    @rule(number=NUMBERS)
    def look_up(self, number: int) -> None:
        found = self.run(self.store.lookup(FOLDER, chain(number).manifest.page_hashes))
        assert parts(found) == ([(0, 4)] if number in self.live() else [])
        if found.hits:
            manifest = decode_manifest(found.hits[0].manifest)
            assert self.is_served or manifest.variants[0].num_dropped == self.lost[number]
            self.note_use(number)

    @rule(number=st.integers(0, 4))
    def pin(self, number: int) -> None:
        try:
            self.run(put_pin(self.store, pin_of(number)))
        except StoreError as e:
            if e.reason != "full":
                raise
            assert self.is_bounded
            assert len({number, *self.pins} & {*self.expires}) > 2  # more than half of the capacity
        else:
            self.pins.add(number)
            self.see_what_went()

    @rule(number=st.integers(0, 4))
    def unpin(self, number: int) -> None:
        assert self.run(self.store.delete_note(PINS, pin_of(number).name)) == (number in self.pins)
        self.pins.discard(number)

    @precondition(lambda self: not self.is_served)
    @rule(number=NUMBERS, ttl_s=st.sampled_from(TIMES_S))
    def replace(self, number: int, ttl_s: int | None) -> None:
        name = chain(number).manifest.key.manifest_name
        old = self.run(self.store.peek(name))
        if old is None or number not in self.live():
            return
        expires = None if ttl_s is None else int(time.time()) + ttl_s
        new = msgspec.structs.replace(decode_manifest(old), expires=expires).encode()
        assert self.run(self.store.replace(name, new, "0" * 32)) == (new == old)
        assert self.run(self.store.replace(name, new, object_digest(old)))
        self.expires[number] = expires
        self.order = [other for other in self.order if other != number]

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        self.run(self.store.delete_prefix(chain(number).manifest.key.stem))
        if number in self.expires:
            self.forget(number)

    @rule(seconds=st.sampled_from([100, 1100]))
    def pass_time(self, seconds: float) -> None:
        self.clock[0] += seconds

    @precondition(lambda self: self.is_directory)
    @rule()
    def restart(self) -> None:
        self.run(self.stack.aclose())
        self.store = self.run(self.stack.enter_async_context(type(self).opened(self.folder)))

    @precondition(lambda self: self.is_directory and not self.is_served)
    @rule()
    def lose_the_catalog(self) -> None:
        assert isinstance(self.store, LocalStore)
        self.run(rebuild(self.store))
        self.order.clear()

    @precondition(lambda self: not self.is_served)
    @rule(capacity=st.integers(0, 6), drop_levels=st.integers(0, 2))
    def sweep(self, capacity: int, drop_levels: int) -> None:
        limit = None if capacity == 6 else capacity * WHOLE
        live, expired = self.live(), {*self.expires} - self.live()
        if self.is_directory:  # any write, such as that of a replaced manifest, may have deleted some
            expired &= self.stored()
        plan = self.run(plan_sweep(self.store, limit, drop_levels))
        evicted = [KEYS[segment.key] for segment in plan.evicted]
        gone, coarser = {*evicted} & live, {KEYS[each.segment.key]: each.num_levels for each in plan.coarser}
        assert (plan.broken, {*evicted} - live, plan.num_expired) == ([], expired, len(expired))
        assert {*evicted[: len(expired)]} == expired
        assert not (gone or coarser) or limit is not None
        left = plan.stored_bytes - plan.freed_bytes
        assert limit is None or left <= limit or gone == live
        if gone and limit is not None:
            assert left + plan.evicted[-1].stored_bytes > limit  # no more go than must
        assert not {*coarser} & (gone | self.pins)
        assert all(self.lost[number] + lost <= drop_levels for number, lost in coarser.items())
        swept = self.run(sweep_segments(self.store, plan.doomed, 0, plan.coarser))
        assert (swept.failures, swept.num_bytes) == ({}, plan.freed_bytes)
        self.require_right_ones(gone, drop_levels)
        for number in evicted:
            self.forget(number)
        for number, lost in coarser.items():
            self.lost[number] += lost

    @invariant()
    def all_is_there(self) -> None:
        stored = self.run(names(self.store))
        found = {MANIFESTS[name] for name in stored if name.endswith(".kvm")}
        assert self.live() <= found <= {*self.expires}
        if not self.is_served:
            manifests = [self.manifest(number) for number in found]
            assert stored == {x for m in manifests for x in (m.key.manifest_name, *m.data_names)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How many seconds this process's clock has gone on, which does not by itself. It is a day ahead of files' times,
    which a catalog that is made anew takes for uses: whatever is used then was used later."""
    ahead, start = [0.0], int(time.time()) + 86_400
    monkeypatch.setattr(time, "time", lambda: start + ahead[0])
    return ahead


@pytest.mark.process
@pytest.mark.usefixtures("tiny_stores")
@pytest.mark.parametrize("kind", ["directory", "bounded", "served", "bucket", "bucket with index"])
def test_a_life(kind: str, clock: list[float], request: pytest.FixtureRequest) -> None:
    options = {"orphan_age_s": AGE_S} | ({"capacity_bytes": CAPACITY, "drop_levels": 1} if kind in BOUNDED else {})

    def open_here(folder: Path) -> AbstractAsyncContextManager[AdminStore]:
        return opened("directory" if kind == "bounded" else kind, folder, request, **options)

    num_examples = 15 if kind in ("directory", "bounded") else 5
    how = settings(
        max_examples=num_examples,
        stateful_step_count=20,
        phases=[Phase.generate],  # a shorter life that fails, too, would be looked for in minutes
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    here = type("Here", (Life,), {"kind": kind, "opened": staticmethod(open_here), "clock": clock})
    run_state_machine_as_test(here, settings=how)


WHOLE_CHAIN = page_hashes(16)
HALVES = [make_segment(WHOLE_CHAIN, first, 8) for first in (0, 8)]


@pytest.mark.process
@pytest.mark.parametrize("store", ["directory", "bucket"], indirect=True)
async def test_gc_keeps_what_is_being_written_again(store: AdminStore) -> None:
    await put_segment(store, expiring(HALVES[0], time.time() - 3600))
    assert (await plan_sweep(store, None)).evicted == []


@pytest.mark.process
@pytest.mark.parametrize("store", ["directory", "served"], indirect=True)
async def test_data_that_is_put_again_waits_for_its_manifest(store: AdminStore, later: Callable[[float], None]) -> None:
    """Later, but by less than data without a manifest must be old to count as left behind: files have the real time."""
    await put_segment(store, expiring(HALVES[0], time.time() + 100))
    later(200)
    await store.put(HALVES[0].data_name, HALVES[0].data)
    await put_segment(store, HALVES[1])  # another's write
    await store.put(HALVES[0].manifest.key.manifest_name, HALVES[0].manifest.encode())
    assert parts(await store.lookup(SMALL_FOLDER, WHOLE_CHAIN)) == [(0, 8), (0, 8)]


@pytest.mark.parametrize("content", [b"", b"nonsense", Pin("", 1, b"x" * 33).encode(), Pin("", 0, b"x" * 32).encode()])
def test_malformed_pins_are_refused(content: bytes) -> None:
    with pytest.raises(FormatError, match="malformed pin"):
        decode_pin(content)


@pytest.mark.usefixtures("tiny_stores")
async def test_a_merged_segment_is_pinned_like_its_halves(tmp_path: Path) -> None:
    """Also when the catalog is made anew, where files that are no pins are skipped."""
    chains = [WHOLE_CHAIN, *(page_hashes(16, str(i)) for i in range(1, 8))]
    whole, *others = (make_segment(each, 0, 16) for each in chains)
    size = len(whole.data) + len(whole.manifest.encode())
    store = LocalStore(tmp_path, capacity_bytes=int(4.5 * size), min_free_bytes=0)
    for segment in HALVES:
        await put_segment(store, segment)
    await put_pin(store, Pin("", 1, b"".join(WHOLE_CHAIN)))
    await put_segment(store, whole)
    for segment in HALVES:
        await store.delete(segment.manifest.key.manifest_name)
    for number in range(2):
        for segment in others:
            await put_segment(store, segment)
        assert parts(await store.lookup(SMALL_FOLDER, WHOLE_CHAIN)) == [(0, 16)], number
        for name in ("0", "0" * 64):
            (tmp_path / ".pins" / name).write_bytes(b"not a pin")
        await rebuild(store)
    await put_pin(store, Pin("", 1, b"".join(chains[6])))
    with failing("full", "pinned segments would take"):  # more than half of the capacity
        await put_pin(store, Pin("", 1, b"".join(chains[7])))
    await store.close()
