from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.data_plane import main


@pytest.mark.slow
def test_a_small_run_fetches_what_it_stored(tmp_path: Path) -> None:
    sizes = ["--codecs", "raw,zstd", "--prefixes", "2", "--tokens", "128", "--rounds", "1"]
    assert main([*sizes, "--json", str(tmp_path / "out.json")]) == 0
    raw, zstd = json.loads((tmp_path / "out.json").read_text())["codecs"]
    assert raw["raw_gb"] == zstd["raw_gb"] == pytest.approx(2 * 128 * 6 * 8 * 128 * 2 * 2 / 1e9)
    assert 0 < zstd["wire_gb"] < raw["wire_gb"] < raw["raw_gb"]
    assert 0 < raw["engine_share_of_cpu"] < 1


@pytest.mark.slow
def test_tls_and_signatures_are_measured(tmp_path: Path) -> None:
    sizes = ["--codecs", "raw", "--prefixes", "1", "--tokens", "128", "--rounds", "1"]
    assert main([*sizes, "--security", "tls", "signed", "--json", str(tmp_path / "out.json")]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())["codecs"]
    assert [row["security"] for row in rows] == ["tls", "signed"]
    assert all(row["fetch_wire_gb_per_s"] > 0 for row in rows)
