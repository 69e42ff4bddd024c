"""What a link is taken for."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from benchmarks.adaptive.policies import last_chunk
from sgl_kvfetch.plane.adapt.estimate import UNKNOWN_LINK, LinkOutlook, Transfer, robust, together


def transfers(*gbps: float) -> list[Transfer]:
    """One a second."""
    return [Transfer(int(rate * 1e9 / 8), float(i), i + 1.0) for i, rate in enumerate(gbps)]


def test_nothing_is_known_before_the_first_transfer() -> None:
    assert last_chunk([]) is None
    assert robust([]) == UNKNOWN_LINK
    prior = LinkOutlook(1e9, 0.1)
    assert robust([], prior) is prior


def test_the_papers_estimate_is_the_last_chunk() -> None:
    assert last_chunk(transfers(6, 3, 4)) == 4e9


@pytest.mark.parametrize("odd", [0.01, 400.0])
def test_one_stall_or_burst_does_not_move_it_much(odd: float) -> None:
    calm = robust(transfers(5, 5.1, 4.9, 5, 5.2))
    shaken = robust(transfers(5, 5.1, 4.9, 5, 5.2, odd))
    assert shaken.median_bps == pytest.approx(calm.median_bps, rel=0.05)
    assert last_chunk(transfers(5, odd)) == pytest.approx(odd * 1e9)  # the baseline goes all the way


@pytest.mark.parametrize("new", [1.0, 30.0])
def test_two_in_a_row_are_a_change(new: float) -> None:
    before = transfers(5, 5.1, 4.9, 5, 5.2, 5, new)
    after = transfers(5, 5.1, 4.9, 5, 5.2, 5, new, new)
    assert robust(before).median_bps == pytest.approx(5e9, rel=0.05)
    assert robust(after).median_bps == pytest.approx(new * 1e9, rel=0.01)


def test_uncertainty_follows_the_spread() -> None:
    steady = robust(transfers(*[5.0] * 8))
    rng = random.Random(1)
    noisy = robust(transfers(*[5.0 * 2 ** rng.gauss(0, 1) for _ in range(8)]))
    first = robust(transfers(5.0))
    assert steady.log_sigma < first.log_sigma < noisy.log_sigma


def test_it_is_nearer_than_the_last_chunk_on_a_noisy_link() -> None:
    rng = random.Random(2)
    errors: dict[str, list[float]] = {"robust": [], "last": []}
    for _ in range(200):
        seen = transfers(*[5.0 * 1.5 ** rng.gauss(0, 1) for _ in range(8)])
        for name, found_bps in (("robust", robust(seen).median_bps), ("last", last_chunk(seen))):
            assert found_bps is not None
            errors[name].append(abs(found_bps - 5e9))
    assert statistics.fmean(errors["robust"]) < 0.6 * statistics.fmean(errors["last"])


def test_connections_add_up() -> None:
    """Two at once, each with half of the link, then one with all of it, after a pause in which nothing was asked."""
    seen = [Transfer(500, 0.0, 1.0), Transfer(500, 0.0, 1.0), Transfer(1000, 3.0, 4.0)]
    for order in itertools.permutations(seen):
        assert [t.goodput_bps for t in together(order)] == [8000.0, 8000.0]


def test_staggered_connections_add_up() -> None:
    """Each has half of the link all the time; one of two begins where the other is halfway."""
    seen = [Transfer(250, 0.0, 0.5), *(Transfer(500, i / 2, i / 2 + 1.0) for i in range(6)), Transfer(250, 3.0, 3.5)]
    assert [t.goodput_bps for t in together(seen)] == pytest.approx([8000.0] * 7)
    assert robust(seen).median_bps == pytest.approx(8000.0)


def test_one_connection_is_left_as_it_is() -> None:
    seen = [Transfer(10, 0.0, 1.0), Transfer(30, 1.0, 2.0), Transfer(7, 5.0, 5.5)]
    assert together(seen) == seen
    assert together([]) == []


def test_a_link_that_varies_by_itself_is_told_from_one_that_wanders() -> None:
    rng = random.Random(3)
    independent = robust(transfers(*[5.0 * 2 ** rng.gauss(0, 1) for _ in range(16)]))
    wandering = robust(transfers(*[5.0 * 1.2**i for i in (0, 1, 2, 3, 4, 5, 4, 3, 2, 1, 0, -1, -2, -1, 0, 1)]))
    assert independent.persistence < 0.5 < wandering.persistence


def test_paths_go_from_where_the_link_is_to_its_median() -> None:
    outlook = LinkOutlook(8e9, 0.0, log_sigma=0.0, persistence=0.5, offset=math.log(4))
    for path in outlook.paths(6):
        assert path == pytest.approx([8e9 * 4**0.5 ** (i + 1) for i in range(6)])


def test_paths_spread_as_they_are_told() -> None:
    paths = LinkOutlook(8e9, 0.0, log_sigma=0.3, persistence=0.7).paths(64)
    logs = [math.log(bps / 8e9) for path in paths for bps in path]
    assert statistics.fmean(logs) == pytest.approx(0, abs=1e-9)
    assert statistics.pstdev(logs) == pytest.approx(0.3, rel=0.2)
    levels = [path[-1] for path in LinkOutlook(8e9, 0.4).paths(5)]  # the median is all that is not known
    assert statistics.pstdev(map(math.log, levels)) == pytest.approx(0.4, rel=0.4)
    assert all(len(set(path)) == 1 for path in LinkOutlook(8e9, 0.4).paths(5))


def test_paths_are_always_the_same() -> None:
    outlook = robust(transfers(5, 9, 3, 4))
    assert outlook.paths(9) == outlook.paths(9)
    assert [path[:4] for path in outlook.paths(9)] == outlook.paths(4)


def test_transfers_that_share_a_link_and_end_almost_together() -> None:
    """What is left of the last ones in the very last moment is not the link's goodput."""
    transfers = [Transfer(1_000_000, 0.0, 1.0 + i * 1e-4) for i in range(8)]
    assert robust(transfers).median_bps == pytest.approx(64e6, rel=0.01)
    assert [t.size_bytes for t in together(transfers)] == [8_000_000]


def test_pauses_between_bursts_do_not_count() -> None:
    """Nor where a burst's last transfer ends a little after the others."""
    bursts = [[Transfer(10**9, at, at + 1.0), Transfer(10**9, at, at + 1.001)] for at in (0.0, 61.0, 100.0)]
    assert [t.goodput_bps for t in together([*bursts[0], bursts[1][0]])] == pytest.approx([16e9, 8e9], rel=0.01)
    seen = [each for burst in bursts for each in burst]
    assert [t.goodput_bps for t in together(seen)] == pytest.approx([16e9] * 3, rel=0.01)
    assert robust(seen).median_bps == pytest.approx(16e9, rel=0.01)
