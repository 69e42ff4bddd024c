from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import fetch


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
