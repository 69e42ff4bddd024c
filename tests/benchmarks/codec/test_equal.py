from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.codec import equal


def _row(name: str, *points: tuple[float, float]) -> dict[str, Any]:
    samples = [{"bits_per_value": bits, "kl": kl, "dnll": 0.0, "top1": 1.0} for bits, kl in points]
    return {"name": name, "family": name.split("-")[0], "samples": samples}


def _report(*rows: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {
        "benchmark": "codec",
        "model": "m/tiny",
        "text": "t",
        "part": "0:1",
        "windows": 2,
        "context_tokens": 128,
        "continuation_tokens": 16,
        "rows": list(rows),
        **other,
    }


OURS = _row("klt-1/ans", (1.0, 1e-2), (1.0, 1e-2)), _row("klt-2/ans", (4.0, 1e-4), (2.0, 1e-4))


def test_bits_at_equal_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Halfway between 1e-2 and 1e-4 are 1e-3, and the root of the product of the bits. A method of one window is
    compared on that window, and one beyond our coarsest row with that row."""
    files = tmp_path / "a.json", tmp_path / "b.json"
    files[0].write_text(json.dumps(_report(*OURS, _row("other-1", (8.0, 1e-3)), _row("other-3", (4.0, 0.5)))))
    files[1].write_text(json.dumps(_report(_row("other-2", (4.0, 5e-4), (4.0, 1.5e-3)))))
    assert equal.main([*map(str, files), "--plot", str(tmp_path / "p.png")]) == 0
    said = capsys.readouterr().out
    lines = {line.split()[1]: line for line in said.splitlines() if "klt-" in line or "other-" in line}
    assert "ours at 1e-03: 1.73 bits a value, 1.41 to 2.00 in 2 single windows\n" in said
    assert "2.00" in lines["other-1"]
    assert "0.25x" in lines["other-1"]
    assert "1.73" in lines["other-2"]
    assert "0.43x" in lines["other-2"]
    assert "< 1.00" in lines["other-3"]
    assert "< 0.25x" in lines["other-3"]
    assert "x" not in lines["klt-1/ans"].split("%")[1]
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_no_bits_beyond_what_was_measured() -> None:
    curves = equal.join([Path("a")], [_report(*OURS)])
    windows = [("0:1", 2, 0), ("0:1", 2, 1)]
    ours = list(curves.values())
    assert equal.bits_at(1e-5, ours, windows) is None
    assert equal.bits_at(1e-2, ours, windows) == pytest.approx(1.0)
    assert equal.bits_at(0.0, ours, windows) is None
    assert equal._say_bits(3e-5, ours) == "ours at 3e-05: not measured"
