"""Two ranks that stage different pages of a prompt on a stand-in GPU: what is loaded is what both have, and no slot but
those of the request is written to. KVFETCH_RANK_CASES is the number of cases that are tried."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.plane import store as client
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.protocol import quantiser
from sgl_kvfetch.stores import Breaker
from sgl_kvfetch.triton_kernels import runtime
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import LAYERS, assert_close, loaded, make_quantiser, use_small_model
from tests.plugin.device.rig import PAGE, Gate, Ranks, Rig, prompt

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CASES = int(os.environ.get("KVFETCH_RANK_CASES", "40"))
NUM_PAGES = 12  # in three spans
WINDOW = 2 * PAGE
NUM_SLOTS = 256
PROMPTS = [prompt(seed, NUM_PAGES) for seed in range(3)]


@dataclass(frozen=True)
class Faults:
    """What one rank meets."""

    num_served: int  # the pages that an audit leaves of a hit
    failing: frozenset[int]  # reads of the prompt, of K and V or of side pages
    is_slow: bool  # whether each read takes long


@dataclass(frozen=True)
class Case:
    which: int  # of the prompts
    num_before: int  # pages that the tree has already
    num_shared: int  # pages of the admitted request and the one that was staged: users choose request ids
    seed: int  # of the order of free slots, and of the GPU's work
    faults: tuple[Faults, Faults]


NO_FAULTS = Faults(NUM_PAGES, frozenset(), False)
some_faults = st.builds(
    Faults,
    num_served=st.just(NUM_PAGES) | st.integers(0, NUM_PAGES),
    failing=st.just(frozenset[int]()) | st.frozensets(st.integers(0, 99), min_size=1, max_size=2),
    is_slow=st.sampled_from([False, False, False, True]),
)
cases = st.builds(
    Case,
    which=st.integers(0, len(PROMPTS) - 1),
    num_before=st.sampled_from([0, 0, 1, 5]),
    num_shared=st.just(NUM_PAGES) | st.integers(6, NUM_PAGES),
    seed=st.integers(0, 1 << 16),
    faults=st.tuples(some_faults, some_faults),
)


class FaultyReads(Gate):
    """Notes reads, and lets some fail, or take long."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, int]] = set()
        self.failing: set[tuple[str, int]] = set()
        self.is_slow = False

    async def pass_through(self, name: str = "", start: int = 0) -> None:
        self.seen.add((name, start))
        if self.is_slow:
            await asyncio.sleep(0.005)
        if (name, start) in self.failing:
            raise StoreError("io", "a read that a test lets fail")


class Rank:
    """A rank with its tree, pool and data plane. ``expected``: K and V of each prompt, by layer."""

    def __init__(self, rig: Rig, expected: list[list[torch.Tensor]]) -> None:
        self.rig, self.expected = rig, expected
        self.reads = rig.store.reads = FaultyReads()
        self.reads_of: list[list[tuple[str, int]]] = [[] for _ in PROMPTS]
        self.num_served = NUM_PAGES
        self.reported: list[int] = []
        report = rig.parts.board.report

        def note(ticket: Any, num_pages: int) -> None:
            self.reported.append(num_pages)
            report(ticket, num_pages)

        rig.parts.board.report = note
        rig.service._prompts._num_served = lambda hashes, sources, _: min(len(sources), self.num_served)

    def play(self, case: Case, faults: Faults) -> int:
        """Let a request arrive, be staged and be admitted. Return how many pages were loaded. Raises AssertionError if
        anything is wrong in the pool."""
        rig, tokens = self.rig, PROMPTS[case.which]
        rig.flush()
        finder = rig.service.client.finder
        finder._lookups, finder._fetches, finder._side_fetches = Breaker(), Breaker(), Breaker()
        allocator: Any = rig.cache.token_to_kv_pool_allocator
        allocator = getattr(allocator, "full_attn_allocator", allocator)
        order = torch.randperm(len(allocator.free_pages), generator=torch.Generator().manual_seed(case.seed))
        allocator.free_pages = allocator.free_pages[order]
        gpu: Any = rig.linker._pages.device
        gpu._random.seed(case.seed)
        if case.num_before:
            rig.compute(tokens[: case.num_before * PAGE])
        self.num_served, self.reads.is_slow = faults.num_served, faults.is_slow
        known = self.reads_of[case.which]
        self.reads.failing = {known[number % len(known)] for number in faults.failing if known}
        self.reads.seen.clear()
        self.reported.clear()
        request = rig.arrive_staged(tokens)
        if case.num_shared < NUM_PAGES:
            request.tokens = [*tokens[: case.num_shared * PAGE], *prompt(9, NUM_PAGES - case.num_shared), 1]
        (num_tokens,) = rig.admit(request)
        assert request.discard_output_reason is None
        slots = rig.checked_slots(request.tokens[:-1], WINDOW)
        of_prompt = slice(case.num_before * PAGE, case.num_before * PAGE + num_tokens)
        found = [buffer[slots[of_prompt]] for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer)]
        assert_close(found, [values[of_prompt] for values in self.expected[case.which]])
        return num_tokens // PAGE


def lose_levels(folder: Path, but: set[Path]) -> None:
    """Let the store drop all levels but the first of segments."""
    for path in {*folder.rglob("*.kvm")} - but:
        manifest = decode_manifest(path.read_bytes())
        variants = tuple(variant.with_levels(1) for variant in manifest.variants)
        path.write_bytes(type(manifest).encode(manifest.__replace__(variants=variants)))


LEVELS = {"count": 3, "max_kl": 10}


@pytest.fixture(params=["klt", "exact", "windows"])
def pair(make: MakeRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Any:
    """Two ranks whose store has all prompts. With `klt`, the cells of the first are coded; those of the second are in
    levels, of which one rank has lost some; those of the third are coded on one rank alone. With `exact`, the first are
    coded, the second are values, and the third are either."""
    use_small_model(monkeypatch, num_heads=1)  # the interpreter takes milliseconds for each
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 4 * PAGE)
    monkeypatch.setattr(client, "Tolerance", partial(Tolerance, within_s=600))
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    common: dict[str, Any] = {"num_layers": LAYERS, "num_slots": NUM_SLOTS}
    kinds: list[list[dict[str, Any]]] = [[{}] * len(PROMPTS)] * 2
    if request.param == "windows":
        common["window"] = WINDOW
    elif request.param == "exact":
        common["following"] = "packed"
        kinds = [[{"codec": "ans"}, {"codec": "zstd"}, {"codec": codec}] for codec in ("ans", "zstd")]
    else:
        common |= {"quantiser": make_quantiser(num_heads=1), "following": "packed"}
        levels = {"codec": "ans", "levels": LEVELS}
        kinds = [[{"codec": "ans"}, levels, {"codec": codec}] for codec in ("ans", "zstd")]
    expected: list[list[list[torch.Tensor]]] = []
    for rank, of_rank in enumerate(kinds):
        writers = []
        for tokens, kind in zip(PROMPTS, of_rank, strict=True):
            there = {*tmp_path.rglob("*.kvm")}
            writers.append(make(**common, **kind, rank=rank))
            writers[-1].stored(tokens)
            if rank and "levels" in kind:
                lose_levels(tmp_path, there)
        expected.append([loaded(writer, tokens) for writer, tokens in zip(writers, PROMPTS, strict=True)])
    ranks = Ranks(2)
    if request.param == "klt":
        common |= {"codec": "ans", "levels": LEVELS}
    rigs = [make(**common, mode="read_only", gpu=FakeDevice(), rank=rank, agree=ranks.agree(rank)) for rank in range(2)]
    return ranks, [Rank(rig, theirs) for rig, theirs in zip(rigs, expected, strict=True)]


def test_ranks_load_what_all_have_into_its_slots_alone(pair: tuple[Ranks, list[Rank]]) -> None:
    ranks, both = pair
    as_a_whole = both[0].rig.windows is not None
    seen = Counter[str]()

    def play(case: Case) -> None:
        try:
            found = ranks.run(lambda rank, history: history.append(both[rank].play(case, case.faults[rank])))
        except BaseException:
            ranks._barrier = threading.Barrier(2, timeout=WAIT_S)
            raise
        (ours,), (theirs,) = (rank.reported for rank in both)
        agreed = min(ours, theirs)
        expected = min(agreed, case.num_shared - case.num_before)
        if as_a_whole and not ours == theirs == expected:
            expected = 0
        assert found == [[expected], [expected]]
        seen["differ"] += ours != theirs
        seen["cut"] += 0 < expected < max(ours, theirs)
        seen["loaded"] += expected > 0

    for which in range(len(PROMPTS)):
        play(Case(which, 0, NUM_PAGES, which, (NO_FAULTS, NO_FAULTS)))
        for rank in both:
            rank.reads_of[which] = sorted(rank.reads.seen)
    assert seen["loaded"] == len(PROMPTS)
    only: dict[str, Any] = {"phases": [hypothesis.Phase.generate], "database": None, "derandomize": True}
    checks = list(hypothesis.HealthCheck)
    settings = hypothesis.settings(max_examples=CASES, deadline=None, suppress_health_check=checks, **only)
    settings(hypothesis.given(cases)(play))()
    assert seen["loaded"] > CASES // 4
    assert seen["differ"] > CASES // 4
    assert as_a_whole or seen["cut"] > CASES // 6
