"""What a link is taken for."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from sgl_kvfetch.plane.fetch.link import UNKNOWN_LINK, LinkOutlook, Transfer, robust


def transfers(*gbps: float) -> list[Transfer]:
    """One a second."""
    return [Transfer(int(rate * 1e9 / 8), float(i), i + 1.0) for i, rate in enumerate(gbps)]


def test_nothing_is_known_before_the_first_transfer() -> None:
    assert robust([]) == UNKNOWN_LINK


@pytest.mark.parametrize("odd", [0.01, 400.0])
def test_one_stall_or_burst_does_not_move_it_much(odd: float) -> None:
    calm = robust(transfers(5, 5.1, 4.9, 5, 5.2))
    shaken = robust(transfers(5, 5.1, 4.9, 5, 5.2, odd))
    assert shaken.median_bps == pytest.approx(calm.median_bps, rel=0.05)


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
        for name, found_bps in (("robust", robust(seen).median_bps), ("last", seen[-1].goodput_bps)):
            errors[name].append(abs(found_bps - 5e9))
    assert statistics.fmean(errors["robust"]) < 0.6 * statistics.fmean(errors["last"])


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
