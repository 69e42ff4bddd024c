import pytest

from benchmarks.codec.ablation import bits_at
from benchmarks.codec.measure import Row
from benchmarks.codec.statistics import Estimate


def point(kl: float, bits: float) -> Row:
    def exactly(x: float) -> Estimate:
        return Estimate(x, 0.0)

    return Row("p", "", "", exactly(bits), 16 / bits, exactly(kl), exactly(0.0), exactly(1.0), 1.0, 1.0)


def test_bits_are_read_off_between_two_points() -> None:
    points = [point(1e-5, 3.0), point(1e-3, 1.0), point(1e-2, 0.5)]
    assert bits_at(points, 1e-4) == pytest.approx(2.0)
    assert bits_at(points, 1e-5) == pytest.approx(3.0)
    assert bits_at(points, 1e-2) == pytest.approx(0.5)


def test_nothing_is_read_off_outside() -> None:
    points = [point(1e-5, 3.0), point(1e-3, 1.0)]
    assert bits_at(points, 1e-6) is None
    assert bits_at(points, 1e-2) is None
