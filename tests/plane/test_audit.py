"""Tests of audits: pages of a store are compared with what the engine computes, and what is wrong is not used."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.metrics import own_metric
from harness.serving import serving
from harness.waiting import until
from sgl_kvfetch.codec.container.pages import QuantisedPages, RawPages
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import MeasuredStep
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.rope import Rope, rotate, unrotate
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.plane import audit
from sgl_kvfetch.plane.audit import Auditor, AuditRecord, keep_record, read_record
from sgl_kvfetch.plane.comparison import Compared, compare
from sgl_kvfetch.plane.fetch.offers import Tolerance
from sgl_kvfetch.plane.store import StoreClient, open_client
from sgl_kvfetch.plane.write.gather import PageBatch
from sgl_kvfetch.plane.write.writer import delete_segment
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.types import TENSORS, KVGeometry
from tests.codec.quant.profiles import make_profile, values_of
from tests.segments import make_heads, page_hashes

ROPE = Rope(inv_freq=tuple(10_000 ** (-i / 8) for i in range(8)))
PROFILE = make_profile(rope=ROPE)
GEOMETRY = KVGeometry(num_layers=3, num_heads=4, k_head_dim=16, v_head_dim=16, page_size=16, dtype="float32")
SIZE, PAGES = GEOMETRY.page_size, 16
NUM_TOKENS = PAGES * SIZE
EXACT, KLT = make_quantiser("exact"), KltQuantiser(PROFILE)

Computed = Callable[[CellValues], CellValues]
Since = Callable[[], dict[str, float]]
Make = Callable[..., "Bench"]


class Bench:
    """A store, the client of a rank, and its auditor, which audits all that it may."""

    def __init__(
        self, file: Path, url: str, quantiser: Quantiser, config: dict[str, Any], writer: str = "", share: float = 1.0
    ) -> None:
        """``file``: what this machine remembers. ``writer``: its name."""
        self.heads = replace(make_heads(GEOMETRY, quantiser), labels=Labels(writer=writer))
        parsed = parse_config({"store": url} | config)
        self.client: StoreClient = open_client(parsed, self.heads, quantiser)
        self.auditor = Auditor(share, self.heads, self.client, file)

    async def store(self, values: CellValues, seed: str = "") -> list[bytes]:
        hashes = page_hashes(len(values.k) // SIZE, seed)
        self.client.writer.add(batch(values, hashes))
        await self.client.writer.drain()
        return hashes

    async def served(self, hashes: Sequence[bytes]) -> int:
        return self.auditor.served(hashes, await self.client.finder.find_pages(hashes, 60.0))

    async def hit(self, hashes: Sequence[bytes], computed: CellValues) -> int:
        """Look up a prompt; the engine computes what is not served, and hands it over. Return how much is served."""
        sources = await self.client.finder.find_pages(hashes, 60.0)
        num_served = self.auditor.served(hashes, sources)
        if num_served < len(hashes):
            rest = computed.tokens(slice(num_served * SIZE, None))
            self.auditor.handed_over(batch(rest, hashes[num_served:], num_served, hashes[:num_served]))
            await self.auditor._tasks.join()
        return num_served

    async def close(self) -> None:
        await self.auditor.close()
        await self.client.close(10.0)


def batch(values: CellValues, hashes: Sequence[bytes], first: int = 0, before: Sequence[bytes] = ()) -> PageBatch:
    pages = RawPages(*(x.unflatten(0, (-1, SIZE)) for x in values))
    return PageBatch(first, before[-1] if before else None, list(hashes), [pages])


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Bench] = []

    def build(quantiser: Quantiser, config: dict[str, Any] | None = None, **options: Any) -> Bench:
        made.append(Bench(tmp_path / "0-4.json", url, quantiser, config or {}, **options))
        return made[-1]

    with serving(tmp_path / "store") as url:
        yield build
        for each in made:
            await each.close()


@pytest.fixture
def since() -> Since:
    """Returns how many audits have ended since the test began, by result."""

    def count() -> dict[str, float]:
        return {name: own_metric("sgl_kvfetch_audits_total", result=name) for name in ("sound", "beyond", "failed")}

    before = count()
    return lambda: {name: number - before[name] for name, number in count().items() if number > before[name]}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """By how many seconds the clock of audits is put forward. The store's is not: it would sweep what is being put."""
    shift_s = [0.0]
    shifted = SimpleNamespace(**vars(time))
    shifted.time = lambda: time.time() + shift_s[0]
    shifted.monotonic = lambda: time.monotonic() + shift_s[0]
    monkeypatch.setattr(audit, "time", shifted)
    return shift_s


@pytest.mark.parametrize("quantiser", [EXACT, KLT, make_quantiser("uint8")], ids=["exact", "klt", "uint8"])
async def test_what_is_stored_as_it_was_computed_is_sound(make: Make, since: Since, quantiser: Quantiser) -> None:
    bench, values = make(quantiser), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(values)
    noise = torch.Generator().manual_seed(0)
    for _ in range(2):  # sums in another order
        again = CellValues(*(x * (1 + 1e-7 * torch.randn(x.shape, generator=noise)) for x in values))
        assert await bench.hit(hashes, again) == PAGES - 8
    assert since() == {"sound": 2}
    assert not bench.auditor.is_over


@pytest.mark.parametrize("fault", [None, "layers"])
async def test_what_a_gpu_has_quantised_is_audited(make: Make, since: Since, fault: str | None) -> None:
    bench, computed = make(KLT), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(computed)
    if fault is not None:
        computed = other_layers(computed)
    sources = await bench.client.finder.find_pages(hashes, 60.0)
    first = bench.auditor.served(hashes, sources)
    # As it hands over batches: the integers of more pages than those that are left out.
    tokens = range((first - 2) * SIZE, NUM_TOKENS)
    place = CellPlace(range(3), range(4), tokens)
    cell = KLT.quantise(computed.tokens(slice(tokens.start, None)), place)
    pages = QuantisedPages([cell], range(2, 2 + PAGES - first), SIZE, GEOMETRY.page_bytes)
    bench.auditor.handed_over(PageBatch(first, hashes[first - 1], hashes[first:], [pages]))
    await bench.auditor._tasks.join()
    assert since() == {"sound" if fault is None else "beyond": 1}


async def test_levels_that_are_left_out_are_allowed_for(make: Make, since: Since) -> None:
    config = {"quantiser": "klt", "profile": "unread", "target_kl": 1e-4, "levels": {"count": 2, "max_kl": 9e-3}}
    bench, computed = make(KltQuantiser(PROFILE, 1e-4), config), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(computed)
    for within_s in (1e9, 1e-9):  # all levels, and one less: the link was measured by then
        bench.client.fetcher.reads.chooser.tolerance = Tolerance(1, within_s)
        await bench.hit(hashes, computed)
    assert since() == {"sound": 2}


def other_weights(values: CellValues) -> CellValues:
    """As after a training step that changes values by a tenth of their spread."""
    noise = torch.Generator().manual_seed(1)
    return CellValues(*(x + 0.1 * x.std(0) * torch.randn(x.shape, generator=noise) for x in values))


def rotated_further(values: CellValues) -> CellValues:
    count = len(values.k)
    k = rotate(unrotate(values.k, ROPE.table(0, count), ROPE), ROPE.table(1, count), ROPE)
    return CellValues(k, values.v)


def other_layers(values: CellValues) -> CellValues:
    return CellValues(*(x.roll(1, dims=1) for x in values))


async def audits_until_over(bench: Bench, stored: CellValues, computed: CellValues) -> int:
    """Return how many hits of as many prompts it takes until nothing is read."""
    for count in range(1, 100):
        await bench.hit(await bench.store(stored, f"prompt {count}"), computed)
        if bench.auditor.is_over:
            return count
    raise AssertionError("not found")


@pytest.mark.parametrize("quantiser", [EXACT, KLT], ids=["exact", "klt"])
@pytest.mark.parametrize("fault", [other_weights, rotated_further, other_layers])
async def test_values_that_are_not_the_models_are_found(
    make: Make, tmp_path: Path, quantiser: Quantiser, fault: Computed
) -> None:
    bench, computed = make(quantiser), values_of(PROFILE, NUM_TOKENS)
    assert await audits_until_over(bench, fault(computed), computed) == 3
    assert "3 of the last 3 audits" in bench.auditor.record.why_off
    assert make(quantiser).auditor.is_over  # this machine remembers it
    assert len([*(tmp_path / "store").rglob("*.kvm")]) == 3  # the store may be right


async def test_a_profile_whose_curve_lies_is_found(make: Make) -> None:
    lying = replace(PROFILE, curve=(MeasuredStep(1.0, 1e-7, 1.0), MeasuredStep(4.0, 1e-5, 0.3)), kinds=())
    bench, computed = make(KltQuantiser(lying, 1e-6)), values_of(PROFILE, NUM_TOKENS)
    assert await audits_until_over(bench, computed, computed) == 3


@pytest.mark.parametrize("times", [1.0, 256.0])
def test_no_profile_says_that_what_is_lost_was_to_be_lost(times: float) -> None:
    """Its inverse and its weights agree; they say that errors of 256 times the size do not matter."""
    scaled = {"inverse": times, "k_weight": times**-2, "v_weight": times**-2}
    changed = {name: getattr(PROFILE.cells[0, 0], name) * by for name, by in scaled.items()}
    quantiser = KltQuantiser(replace(PROFILE, cells={(0, 0): replace(PROFILE.cells[0, 0], **changed)}))
    values, place = values_of(PROFILE, 128), CellPlace(range(3), range(4), range(128))
    restored = quantiser.dequantise(quantiser.quantise(values, place), torch.float32, place)
    found = compare(values, restored, quantiser, make_heads(GEOMETRY, quantiser), range(128))
    assert found.typical < 1.5
    assert (found.ratio > 4) == (times > 1), found


def test_tokens_that_are_alike_vary_less_than_sound_errors() -> None:
    """As in a run of blanks: what tells them apart may be lost."""
    values = CellValues(*(x[:1].expand(128, *x.shape[1:]).clone() for x in values_of(make_profile(), 1)))
    values.v[:, 0, 0, 0] += torch.arange(128) / 1e4
    place, quantiser = CellPlace(range(3), range(4), range(128)), KltQuantiser(make_profile(), step=1.0)
    restored = quantiser.dequantise(quantiser.quantise(values, place), torch.float32, place)
    assert compare(values, restored, quantiser, make_heads(GEOMETRY, quantiser), range(128)).ratio < 4


async def test_one_wrong_segment_is_deleted_once_another_is_sound(make: Make, since: Since) -> None:
    bench, computed = make(KLT), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(computed)
    wrong = await bench.store(other_layers(computed), "wrong")
    assert await bench.hit(wrong, computed) == PAGES - 8
    assert await bench.hit(wrong, computed) == 0  # a suspect is stored, and not served
    assert len(found := await bench.client.finder.find_pages(wrong, 60.0)) == PAGES
    assert bench.auditor.served(wrong, found, False) == 0
    for _ in range(5):
        await bench.hit(hashes, computed)
    assert await bench.client.finder.find_pages(wrong, 60.0) == []
    assert since() == {"beyond": 1, "sound": 5}
    assert not bench.auditor.is_over


async def test_the_same_pages_are_no_further_evidence(make: Make, since: Since) -> None:
    """They are handed over although the store has them. One prompt whose sums depend much on their order must not end
    all reads because it is asked often."""
    bench, computed = make(KLT), values_of(PROFILE, NUM_TOKENS)
    bench.client.writer.on_known = bench.auditor.known
    await bench.store(other_weights(computed), "odd")
    for _ in range(12):
        bench.auditor._begun.clear()
        await bench.store(computed, "odd")  # computed again, since it is not served
        await bench.auditor._tasks.join()
    assert since()["beyond"] >= 3
    assert not bench.auditor.is_over


async def test_hits_are_audited_by_chance_and_the_first_one_soon(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = values_of(PROFILE, NUM_TOKENS)
    audited, make_random = [], random.Random
    for seed in range(2):
        monkeypatch.setattr("sgl_kvfetch.plane.audit.random.Random", lambda seed=seed: make_random(seed))
        bench = make(EXACT, share=0.01)
        hashes = await bench.store(computed)
        audited.append([i for i in range(1, 1001) if await bench.served(hashes) < PAGES])
    assert all(which[0] <= 50 for which in audited)
    assert all(5 <= len(which) <= 20 for which in audited)
    assert len({tuple(which) for which in audited}) == 2


async def test_after_one_that_is_wrong_the_next_hits_are_audited(make: Make) -> None:
    bench, computed = make(EXACT, share=0.01), values_of(PROFILE, NUM_TOKENS)
    bench.auditor._random = random.Random(0)
    wrong = await bench.store(other_weights(computed), "wrong")
    served = [await bench.hit(wrong, computed) for _ in range(51)]
    (first,) = [i for i, count in enumerate(served) if count == PAGES - 8]
    assert served == [PAGES] * first + [PAGES - 8] + [0] * (50 - first)
    assert await audits_until_over(bench, other_weights(computed), computed) == 2
    assert "3 of the last 3 audits" in bench.auditor.record.why_off


async def test_what_one_writer_stores_ends_no_reads_of_what_others_do(
    make: Make, since: Since, clock: list[float]
) -> None:
    computed = values_of(PROFILE, NUM_TOKENS)
    good, bad, bench = (make(EXACT, writer=name) for name in ("good", "bad", "own"))
    slightly = CellValues(*(x * (1 + 1e-5) for x in computed))
    sound = [await good.store(computed, f"good {i}") for i in range(3)]
    wrong = [await bad.store(slightly, f"bad {i}") for i in range(6)]
    await bench.hit(sound[0], computed)
    for hashes in wrong[:3]:
        assert await bench.hit(hashes, computed) == PAGES - 8
        assert await bench.hit(hashes, computed) == 0
    assert since() == {"sound": 1, "beyond": 3}
    assert not bench.auditor.is_over
    assert await bench.served(wrong[3]) == 0  # whose audit nobody made
    assert await bench.hit(sound[1], computed) == PAGES - 8
    for hashes in wrong[:3]:
        assert await bench.client.finder.find_pages(hashes, 60.0) == []
    clock[0] += 601
    assert await bench.served(wrong[3]) == PAGES - 8


async def test_a_segment_that_was_written_again_meanwhile_is_served_and_stays(make: Make) -> None:
    bench, other, computed = make(EXACT), make(EXACT), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(other_weights(computed), "wrong")
    await bench.hit(hashes, computed)
    sources = await bench.client.finder.find_pages(hashes, 60.0)
    await delete_segment(other.client.store, sources[0].reader.manifest)
    await other.store(computed, "wrong")
    bench.client.finder.forget_pages()
    assert await bench.hit(hashes, computed) == PAGES - 8  # sound, which deletes suspects
    bench.client.finder.forget_pages()
    assert await bench.served(hashes) == PAGES - 8


async def test_a_server_tries_again_later_each_time_and_goes_on_if_it_is_right(
    make: Make, clock: list[float], tmp_path: Path
) -> None:
    """It serves nothing until it is."""
    computed = values_of(PROFILE, NUM_TOKENS)
    for number in (1, 2, 3):
        bench, is_wrong = make(EXACT), number < 3
        if number > 1:
            assert not bench.auditor.is_trying
            clock[0] += 600 * (number - 1) + 1
            bench = make(EXACT)  # after a restart
            await until(lambda bench=bench: bench.auditor.is_trying)  # type: ignore[misc]
        for i in range(3):
            assert bench.auditor.is_over == (number > 1)
            hashes = await bench.store(other_weights(computed) if is_wrong else computed, f"prompt {number} {i}")
            sources = await bench.client.finder.find_pages(hashes, 60.0)
            assert len(sources) == PAGES
            assert bench.auditor.served(hashes, sources, number == 1 or i > 0) == (PAGES - 8 if number == 1 else 0)
            bench.auditor.handed_over(batch(computed, hashes))
            await bench.auditor._tasks.join()
        record = read_record(tmp_path / "0-4.json")
        assert record is not None
        assert bool(record.why_off) == bench.auditor.is_over == is_wrong
        if is_wrong:
            assert (record.num_off, record.try_again_s) == (number, record.off_at_s + 600 * number)
    assert await bench.served(hashes) == PAGES - 8


def test_servers_of_a_machine_lose_nothing_of_what_each_other_found(tmp_path: Path) -> None:
    path = tmp_path / "0-4.json"
    new = AuditRecord("", "", "", "")

    def audit_often(number: int) -> None:
        for i in range(50):
            part = Compared(1.0, "all layers", 1.0)
            assert keep_record(path, lambda kept: (kept or new).and_also(part, 1000 * number + i))  # noqa: B023

    threads = [threading.Thread(target=audit_often, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    record = read_record(path)
    assert record is not None
    assert record.num_audits == 200
    assert {part.end_token for part in record.parts} == {1000 * number + i for number in range(4) for i in range(50)}


def exchanged_pages(x: torch.Tensor) -> torch.Tensor:
    pages = x[:128].clone().unflatten(0, (-1, SIZE))
    pages[:2, :, 1:] = pages[:2, :, 1:].flip(0)
    return pages.flatten(0, 1)


def exchanged_heads(x: torch.Tensor) -> torch.Tensor:
    x = x[:128].clone()
    x[:, 2, :2] = x[:, 2, :2].flip(1)
    return x


def a_token_lost(x: torch.Tensor) -> torch.Tensor:
    x = x[:128].clone()
    x[-1] = 0
    return x


@pytest.mark.parametrize("which", [(True, False), (False, True)], ids=["k", "v"])
@pytest.mark.parametrize("fault", [exchanged_pages, exchanged_heads, a_token_lost])
@pytest.mark.parametrize("quantiser", [EXACT, KLT], ids=["exact", "klt"])
def test_faults_of_a_few_pages_or_heads_above_the_first_layer_are_found(
    quantiser: Quantiser, fault: Callable[[torch.Tensor], torch.Tensor], which: tuple[bool, bool]
) -> None:
    """Where the median token, of all layers and of each, is sound."""
    computed, place = values_of(PROFILE, 128), CellPlace(range(3), range(4), range(128))
    stored = quantiser.dequantise(quantiser.quantise(computed, place), torch.float32, place)
    wrong = CellValues(*(fault(x) if is_wrong else x for x, is_wrong in zip(stored, which, strict=True)))
    heads = make_heads(GEOMETRY, quantiser)
    assert compare(computed, stored, quantiser, heads, range(128)).ratio < 2
    assert compare(computed, wrong, quantiser, heads, range(128)).ratio > 4


def test_tokens_that_are_alike_are_no_mix_up() -> None:
    """Of equal tokens, none is nearer to another than to itself, whatever sums change."""
    noise = torch.Generator().manual_seed(0)
    one = CellValues(*(torch.randn((1, 3, 4, 16), generator=noise).expand(128, -1, -1, -1) for _ in TENSORS))
    stored = CellValues(*(x * (1 + 1e-6 * torch.randn(x.shape, generator=noise)) for x in one))
    assert compare(one, stored, EXACT, make_heads(GEOMETRY), range(128)).ratio < 1


@pytest.mark.parametrize(("first_layer", "is_sound"), [(4, True), (0, False)])
def test_layers_behind_a_token_that_sums_decide_are_no_fault(first_layer: int, is_sound: bool) -> None:
    """Later tokens attend to one token or not, as its sums were rounded. Then they differ in all layers from some one
    on. Those of another model differ in the first layers, too."""
    geometry = replace(GEOMETRY, num_layers=12, dtype="bfloat16")
    noise = torch.Generator().manual_seed(2)
    computed, error = (
        CellValues(*(torch.randn((128, 12, 4, 16), generator=noise).bfloat16() for _ in TENSORS)) for _ in range(2)
    )
    stored = CellValues(*(x.clone() for x in computed))
    for x, change in zip(stored, error, strict=True):
        x[:, first_layer:] += 0.06 * change[:, first_layer:]
    found = compare(computed, stored, EXACT, make_heads(geometry), range(128))
    assert found.typical > 4
    assert (found.ratio < 4) == is_sound


async def test_errors_that_are_a_little_too_large_in_all_audits_are_told(make: Make, tmp_path: Path) -> None:
    """Each audit is sound, and twenty are not: as with weights that changed by 3%."""
    coarse = KltQuantiser(PROFILE, step=KLT.step * 1.6)
    bench, computed = make(KLT), values_of(PROFILE, NUM_TOKENS)
    place = CellPlace(range(3), range(4), range(NUM_TOKENS))
    stored = coarse.dequantise(coarse.quantise(computed, place), torch.float32, place)
    hashes = await bench.store(stored)
    for count in range(1, 25):
        await bench.hit(hashes, computed)
        assert bench.auditor.record.summary().drifts == (count >= 20)
    assert not bench.auditor.is_over
    record = read_record(tmp_path / "0-4.json")
    assert record == bench.auditor.record
    found = record.summary()
    assert (found.num_audits, found.num_recent, found.ratio < 4) == (24, 20, True)
    assert found.typical == own_metric("sgl_kvfetch_audit_drift") > 1.5
    assert found.before == pytest.approx(found.typical, rel=0.2)
    assert list(found.by_length) == ["to 1024"]
    assert "it does not fit the prompts" in found.says


async def test_no_more_is_audited_in_a_minute_than_may_be(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    monkeypatch.setattr(audit, "_MOST_BYTES", 2 * 8 * GEOMETRY.page_bytes)
    bench, computed = make(EXACT), values_of(PROFILE, NUM_TOKENS)
    hashes = await bench.store(computed)
    assert [await bench.hit(hashes, computed) for _ in range(3)] == [PAGES - 8, PAGES - 8, PAGES]
    clock[0] += 61
    assert await bench.hit(hashes, computed) == PAGES - 8
