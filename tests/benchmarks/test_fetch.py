from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fetch


def test_the_ideal_is_the_longest_stage_alone() -> None:
    stages = fetch.Stages(transmit_s=3.0, decode_s=1.0, restore_s=0.5, decode_restore_s=1.4, actual_s=4.0)
    assert (stages.ideal_s, stages.efficiency) == (3.0, 0.75)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--settings", "link,moon"], "unknown are moon"), (["--policy", "ours"], "--decode-profile need each other")],
)
def test_arguments_that_do_not_fit_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        fetch.main(arguments)
    assert message in capsys.readouterr().err


def test_a_short_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"bw": [2.0, 4.0]}\n')
    out = tmp_path / "out.json"
    arguments = ["--tokens", "256", "--codecs", "zstd", "--rounds", "1", "--settings", "link"]
    assert fetch.main([*arguments, "--trace", str(trace), "--json", str(out)]) == 0
    [row] = json.loads(out.read_text())["settings"]
    assert row["name"] == "link"
    assert row["ideal_s"] == max(row["stages_s"]["transmit"], row["stages_s"]["decode_restore"])
    assert row["efficiency"] == pytest.approx(row["ideal_s"] / row["actual_s"])
    # The link takes three times as long as decoding and restoring took when it was set.
    assert row["stages_s"]["transmit"] > row["stages_s"]["decode_restore"]
