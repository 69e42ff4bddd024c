from __future__ import annotations

import json
from pathlib import Path

from sgl_kvfetch.timeline import Recorded, Request, SpanFile, Timeline
from tests.tools.conftest import kvfetch


def record(path: Path, *spans: tuple[str, str, float, float]) -> str:
    recorder = Timeline(SpanFile(path))
    for name, *span in spans:
        recorder.add(Recorded(Request(name), *span))  # type: ignore[arg-type]
    recorder.close()
    return str(path)


def test_the_spans_of_several_files_as_a_trace(tmp_path: Path) -> None:
    engine = record(tmp_path / "t.0", ("a", "parked", 10.0, 12.0), ("b", "parked", 10.5, 11.0))
    data = record(
        tmp_path / "t.0.data", ("a", "decode", 11.0, 11.5), ("a", "decode", 11.25, 11.75), ("a", "decode", 11.5, 11.6)
    )
    with open(data, "a") as file:
        file.write('{"request": "a", "stage": "dec')  # it is being written
    out = tmp_path / "trace.json"
    result = kvfetch("timeline", engine, data, "--perfetto", str(out))
    assert result.exit_code == 0, result.output
    events = json.loads(out.read_text())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {(1, 0): "a", (1, 1): "parked", (2, 0): "b", (2, 2): "parked", (1, 3): "decode", (1, 4): "decode"}
    shown = [(e["pid"], e["tid"], e["name"], e["ts"], round(e["dur"])) for e in events if e["ph"] == "X"]
    assert shown == [
        (1, 1, "parked", 0, 2_000_000),
        (2, 2, "parked", 500_000, 500_000),
        (1, 3, "decode", 1_000_000, 500_000),
        (1, 4, "decode", 1_250_000, 500_000),
        (1, 3, "decode", 1_500_000, 100_000),
    ]


def test_what_is_no_timeline(tmp_path: Path) -> None:
    file, out = tmp_path / "file", str(tmp_path / "trace.json")
    assert "No such file" in kvfetch("timeline", str(file), "--perfetto", out).stderr
    file.write_text("")
    assert "no spans" in kvfetch("timeline", str(file), "--perfetto", out).stderr
    file.write_text('{"request": "a"}\n')
    result = kvfetch("timeline", str(file), "--perfetto", out)
    assert result.exit_code == 2
    assert f"{file}, line 1: expected a span of a timeline" in result.stderr
    assert not Path(out).exists()
