import pytest

from benchmarks.interference import Sample, _parse, _plan, _rows, main


def sample(ttft_s: list[float], tpot_s: list[float], long: int = 0) -> Sample:
    return Sample(ttft_s, tpot_s, [2.0] * long, [1520] * long)


def test_ratios_are_medians_of_paired_rounds() -> None:
    """The machine was twice as slow in the second round, for both modes: that is no interference."""
    rows = _rows(
        {
            "none": [sample([0.1, 0.1, 0.4], [0.01]), sample([0.2, 0.2, 0.8], [0.02]), sample([0.1] * 3, [0.01])],
            "device": [sample([0.11] * 3, [0.01], 1), sample([0.22] * 3, [0.02], 1), sample([0.3] * 3, [0.04], 1)],
        }
    )
    none, device = rows
    assert none["ratio_ttft_p50"] == 1.0
    assert device["ratios_ttft_p50"] == pytest.approx([1.1, 1.1, 3.0])
    assert device["ratio_ttft_p50"] == pytest.approx(1.1)
    assert device["ratio_tpot_p50"] == pytest.approx(1.0)
    assert device["long_storage_tokens"] == [1520] * 3
    assert none["long_ttft_s"] is None


def test_every_mode_sends_the_same_at_the_same_times() -> None:
    args = _parse(["--launch", "--duration", "10", "--short-rate", "3"])
    assert _plan(args) == _plan(args)
    plan = _plan(args)
    assert 15 < len(plan.short) < 50
    assert all(0 < start_s < 10 for start_s, _ in plan.short)
    assert len({tuple(prompt) for _, prompt in (*plan.short, *plan.long)}) == len(plan.short) + len(plan.long)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--launch"),
        (["--launch", "--modes", "none,devise"], "unknown are devise; known are none, device, host, blocking"),
        (["--launch", "--modes", "device"], "'none' is what the others are compared with"),
    ],
)
def test_what_is_wrong_is_named(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
