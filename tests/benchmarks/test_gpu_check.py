"""The run of all that needs a GPU, without one: what it does then, and its parts over fakes."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import (
    __main__ as command,
    driver_libraries,
    interference,
    kernels,
    memory,
    nvdec,
    nvdec_damage,
    nvdec_decoders,
    nvenc,
    passes,
    report,
    server,
    tests,
)
from benchmarks.gpu_check.clips import make_frames
from benchmarks.gpu_check.record import Record, SkippedError
from benchmarks.gpu_check.runner import _END_S, Result, run_step
from benchmarks.gpu_check.steps import STEPS, TOTAL_S, Step
from benchmarks.gpu_check.ticker import Ticker
from benchmarks.kernel_bytes import Span
from benchmarks.memory import SPAN_TOKENS, Setup, repeated_segments
from harness import stand_in_pool
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.codec.bitstream import nvenc as nvenc_codec
from sgl_kvfetch.codec.bitstream.hevc import HevcCodec
from sgl_kvfetch.codec.bitstream.nvdec import Nvdec
from sgl_kvfetch.codec.bitstream.surfaces import NUM_SURFACES
from sgl_kvfetch.triton_kernels import runtime
from tests.codec.bitstream import fake_nvenc
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_caps, make_nvdec
from tests.plugin.device.fake_streams import FakeDevice

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def test_without_a_gpu_it_ends_well_and_names_what_it_skipped() -> None:
    before = sorted((ROOT / "docs" / "gpu").iterdir())
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "scripts" / "gpu_check"], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["skipped", step.name] for step in STEPS]
    assert all("finds no usable CUDA GPU" in line for line in lines[:-1])
    assert lines[-1] == "no GPU: nothing was measured or written"
    assert sorted((ROOT / "docs" / "gpu").iterdir()) == before


def test_all_steps_fit_into_the_time() -> None:
    assert sum(step.limit_s for step in STEPS) <= TOTAL_S < 600 - _END_S


def test_all_steps_can_be_imported_and_pages_restored_without_sglang() -> None:
    """This module imports the steps."""
    chosen = "test_a_fetch_into_the_pool_is_checked or test_every_step_has_a_function"
    assert "2 passed" in pytest_without_sglang(__file__, "-k", chosen)


def test_tests_that_need_a_gpu_need_no_sglang() -> None:
    files = [name for name in tests.find_files() if not name.startswith("tests/plugin/")]
    found = pytest_without_sglang("--collect-only", "-m", "gpu", *files)
    assert {line.partition("::")[0] for line in found.splitlines() if "::" in line} == set(files)
    assert "error" not in found


def pytest_without_sglang(*arguments: str) -> str:
    """Run pytest in a process where importing SGLang fails. Return what it prints."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.benchmarks.without_sglang", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300).stdout


def test_every_step_has_a_function() -> None:
    for step in STEPS:
        module, _, function = step.runs.partition(":")
        assert callable(getattr(importlib.import_module(module), function)), step.runs


# A step's process


def run_one(name: str, folder: Path, limit_s: float = 20.0) -> Result:
    return run_step(Step(name, name, f"tests.benchmarks.gpu_steps:{name}", limit_s), folder, limit_s)


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("passes", "passed", ""),
        ("skips", "skipped", "nothing to see"),
        ("lacks", "skipped", "a_module_that_nobody_has is not installed"),
        ("fails_twice", "failed", "first; second"),
        ("raises", "failed", "ValueError: no"),
        ("crashes", "failed", "before; killed by signal 11"),
        ("needs_ours", "failed", "exit code 1"),
    ],
)
def test_how_a_step_ends(name: str, outcome: str, reason: str, tmp_path: Path) -> None:
    result = run_one(name, tmp_path)
    assert (result.outcome, result.reason) == (outcome, reason)
    if name in ("passes", "raises", "crashes"):
        assert result.rows[0]["name"] == "one"
    if name == "raises":
        assert "Traceback" in result.log_tail


def test_a_step_that_hangs_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHILD", str(tmp_path / "child"))
    result = run_one("hangs", tmp_path, limit_s=5.0)
    assert (result.outcome, result.reason) == ("failed", "not done within 5 s")
    assert result.rows[0]["name"] == "one"
    wait_until(lambda: not is_running((tmp_path / "child").read_text()))


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_run_goes_on_after_a_failure_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"table": "Machine", "what": "gpu", "is": "NVIDIA H100"}]
    ends = {
        "machine": Result("machine", "Machine", "passed", rows=rows),
        "kernels": Result("kernels", "Kernels", "failed", "killed by signal 11", log_tail="last words"),
    }
    monkeypatch.setattr(command, "run_step", lambda step, *_: ends.get(step.name, Result(step.name, "", "passed")))
    monkeypatch.setattr(driver_libraries, "complete", lambda folder: ["a library was missing"])
    assert command.main(["--out", str(tmp_path), "--only", "kernels", "tests"]) == 1
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()][:5] == [
        ["passed", "machine"],
        ["machine:", "a"],
        ["failed", "kernels"],
        ["|", "last"],
        ["passed", "tests"],
    ]
    content = json.loads((tmp_path / "nvidia-h100.json").read_text())
    assert [step["outcome"] for step in content["steps"]] == ["passed", "failed", "passed"]
    page = (tmp_path / "nvidia-h100.md").read_text()
    assert "| Kernels | failed | 0 | killed by signal 11 |" in page
    assert "* machine: a library was missing" in page


def test_the_whole_runs_time_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def ends(step: Step, folder: Path, limit_s: float) -> Result:
        limits.append(limit_s)
        return Result(step.name, "", "passed")

    monkeypatch.setattr(command, "run_step", ends)
    monkeypatch.setattr(driver_libraries, "complete", lambda folder: [])
    clock = iter([0.0, 100.0, TOTAL_S - 30.0, TOTAL_S - 2.0])
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    first, *others = STEPS
    results = list(command.run(first, others[:3], tmp_path))
    assert limits == [first.limit_s, others[0].limit_s, 30.0]
    assert (results[-1].outcome, results[-1].reason) == ("skipped", f"the {TOTAL_S:.0f} s for the whole run are over")


def test_a_page_has_a_table_for_each_kind_of_row(tmp_path: Path) -> None:
    result = run_one("passes", tmp_path)
    lines = report.page([result], None, "today").splitlines()
    assert lines[0] == "# No GPU"
    assert "* passes: a goal was missed" in lines
    start = lines.index("## numbers")
    assert lines[start + 2 :] == [
        "| name | value | more |",
        "|---|---|---|",
        "| one | 1.235 |  |",
        "| two | 2 | a\\|b |",
    ]


# What the steps do


def found_by(record: Record) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.path.read_text())
    return content


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "found.json")


TINY = [Span(17, heads=1, dim=48), Span(17, heads=2, dim=16, coefficients=20)]
CASES = ["frame_sum", "restore exact", "restore symmetric", "restore_klt V", "restore_klt K", "restore_klt K, GPT-J"]


def test_kernels_are_held_against_their_references(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert runtime.use_kernels(device)
    kernels.check(record, device, TINY)
    found = found_by(record)
    assert not found["reason"]
    assert [(row["kernel"], row["found"]) for row in found["rows"]] == [(name, "as the reference's") for name in CASES]

    def wrong(*arguments: Any, **options: Any) -> None:
        pass  # leaves the poison

    monkeypatch.setattr(kernels, "restore", wrong)
    monkeypatch.setattr(kernels, "restore_klt", wrong)
    monkeypatch.setattr(kernels, "frame_sum", lambda frames: torch.tensor([1], device=frames.device))
    kernels.check(record, device, TINY)
    assert all(f"{name}, 17 tokens" in found_by(record)["reason"] for name in CASES)


def test_kernels_are_measured(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 2.0] * len(CASES))  # of a copy, then of the kernel
    monkeypatch.setattr(kernels, "seconds_of", lambda work, device: next(seconds))
    kernels.measure(record, CPU, [*TINY[:1], Span(64, heads=2, dim=16, coefficients=20)])
    found = found_by(record)
    assert [row["kernel"] for row in found["rows"]] == CASES
    assert {row["share_of_copy"] for row in found["rows"]} == {0.5}
    assert [note.split(", 64 tokens")[0] for note in found["notes"]] == CASES[3:]  # of the longest


def test_nvdec_is_checked(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvdec_damage, "_FLIPS", 10)
    monkeypatch.setitem(nvdec.SIZES, "240p", (2, 160, 176))
    nvc = FakeNvc(FakeDevice())
    decoders = make_nvdec(nvc).open_session()
    nvdec.check_bits(record, decoders, ["smallest", "240p"])
    nvdec_damage.check_damage(record, {"hevc": decoders["hevc"]})
    found = found_by(record)
    assert not found["reason"]
    bits, damage = found["rows"][:-2], found["rows"][-2:]
    assert [row["size"] for row in bits] == ["smallest", "240p", "240p", "smallest"] * 2
    assert {row["found"] for row in bits} == {"equal"}
    assert damage[0]["corrupt"] == 5
    assert damage[1]["corrupt"] + damage[1]["other pixels"] + damage[1]["as if whole"] >= 10
    nvc.fails = "pixels"
    nvdec.check_bits(record, {"hevc": decoders["hevc"]}, ["smallest"])
    assert found_by(record)["reason"] == "; ".join(["hevc smallest: other pixels: device"] * 2)
    nvc.fails = ""
    monkeypatch.setattr("sgl_kvfetch.codec.bitstream.nvdec.frame_sum", lambda frames: torch.tensor([1]))
    nvdec.check_bits(record, {"hevc": decoders["hevc"]}, ["smallest"])
    assert found_by(record)["reason"].count("hevc smallest: another frame sum") == 2


def test_throughput_is_measured_by_sessions(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = FakeNvc(FakeDevice())
    monkeypatch.setitem(nvdec.SIZES, "240p", (1, 144, 144))
    engines = Nvdec(nvc, nvc.device, {"hevc": make_caps(num_engines=2)})
    nvdec.measure(record, engines, [1, 4], {"240p": (2, 6)}, seconds=0.05)
    rows = [row for row in found_by(record)["rows"] if "sessions" in row]
    assert [(row["sessions"], row["verified_by"]) for row in rows] == [(1, "sum"), (4, "sum"), (4, "copy")] * 2
    assert {row["latency"] for row in rows} == {"NATIVE"}
    assert rows[0]["share_of_sessions_times_one"] == 1.0
    assert 1 < rows[0]["bits_a_value"] < rows[3]["bits_a_value"] < 9
    for row in rows:
        assert row["mbit_a_second"] == pytest.approx(1e3 * row["gb_of_values_a_second"] * row["bits_a_value"])
        assert row["mbit_a_second_an_engine"] == row["mbit_a_second"] / min(2, row["sessions"])
    sums = [row for row in found_by(record)["rows"] if "sum_us" in row]
    assert [row["bits_a_value"] for row in sums] == [rows[0]["bits_a_value"], rows[3]["bits_a_value"]]
    for row in sums:
        assert row["sum_percent"] == pytest.approx(100 * row["sum_us"] / row["decode_and_sum_us"])


def test_throughput_covers_sessions_sizes_and_bits() -> None:
    assert nvdec._session_counts(7) == [1, 7, 14, 21]
    assert nvdec._session_counts(1) == [1, 2, 3]
    assert set(nvdec._CLIPS) == set(nvdec.SIZES) - {"smallest"}
    found = [
        8 * len(HevcCodec().encode(make_frames(1, 240, 432, bits))) / (3 * 240 * 432) for bits in nvdec._CLIPS["240p"]
    ]
    assert found[0] < 1 < 7 < found[-1]
    assert all(0.5 < after - before < 1.5 for before, after in pairwise(found))


def test_low_latency_is_measured_beside_native(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = FakeNvc(FakeDevice())
    monkeypatch.setitem(nvdec.SIZES, "240p", (3, 144, 144))
    nvc.latency = nvc.DisplayDecodeLatencyType.LOW  # raises if another one is asked for
    low = nvdec.with_low_latency(make_nvdec(nvc))
    nvdec.measure(record, low, [1], {"240p": (2,)}, latency="LOW", seconds=0.05)
    nvdec.check_bits(record, low.open_session(), ["240p"])
    found = found_by(record)
    assert not found["reason"]
    assert [row["latency"] for row in found["rows"] if "sessions" in row] == ["LOW"] * 4
    assert ("CreateDecoder", 144, 144) in nvc.calls
    assert low.surfaces.limit_bytes is None


def test_memory_of_decoders_is_put_beside_what_is_counted(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = FakeNvc(FakeDevice())
    engines = make_nvdec(nvc)
    # As if the driver took twice what is counted, and kept 1 MB of it.
    monkeypatch.setattr(
        nvdec_decoders, "_bytes_beside_torch", lambda: 2 * engines.surfaces.taken_bytes + 10**6 * len(nvc.calls[:1])
    )
    nvdec_decoders.measure_memory(record, engines, ["smallest"], seconds=0.0)
    rows = found_by(record)["rows"]
    assert [row["codec"] for row in rows] == ["hevc", "hevc420"]
    for row, planes in zip(rows, (3, 1.5), strict=True):
        assert 1 <= row["decoders"] <= 8
        assert row["counted_mb"] == NUM_SURFACES * planes * 144 * 144 / 1e6
    assert rows[0]["kept_after_destruction_mb"] == 1 / rows[0]["decoders"]
    assert rows[1]["taken_mb"] == pytest.approx(2 * rows[1]["counted_mb"])
    assert rows[1]["kept_after_destruction_mb"] == 0
    nvc.fails = "create"
    nvdec_decoders.measure_memory(record, engines, ["smallest"], seconds=0.0)
    assert "hevc smallest: NVDEC gave no decoder" in found_by(record)["reason"]


def test_gaps_of_a_ticker_are_measured(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = FakeNvc(FakeDevice())
    monkeypatch.setitem(nvdec_decoders.SIZES, "240p", (2, 144, 160))
    monkeypatch.setitem(nvdec_decoders.SIZES, "1080p", (1, 176, 192))
    monkeypatch.setattr(torch.cuda, "synchronize", nvc.device.run)
    engines = make_nvdec(nvc, num_engines=1)
    nvdec_decoders.measure_gaps(record, engines, seconds=0.01, side=16)
    rows = found_by(record)["rows"]
    beside = ["nothing", "creating decoders", "decoding", "reconfiguring a decoder", "destroying decoders"]
    assert [(row["device"], row["beside"]) for row in rows] == [(d, b) for d in ("idle", "busy") for b in beside]
    assert not any(row["problem"] for row in rows)
    assert all(row["longest_gap_ms"] > 0 for row in rows)
    there_and_back = [(160, 144), (192, 176), (192, 176), (160, 144)]
    assert [call[1:] for call in nvc.calls if call[0] == "setReconfigParams"] == there_and_back * 2
    assert engines.surfaces.taken_bytes == 0  # all were destroyed

    nvc.fails = "decode"
    nvdec_decoders.measure_gaps(record, engines, seconds=0.01, side=16)
    assert "error 999" in found_by(record)["rows"][-2]["problem"]


def test_a_gap_is_as_long_as_the_interpreter_lock_is_held() -> None:
    with Ticker() as ticker:
        ctypes.PyDLL(None).usleep(200_000)
    assert ticker.longest_s >= 0.2


def test_nvenc_is_checked(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nvenc.SIZES, "240p", (2, 160, 176))
    nvc = fake_nvenc.install(monkeypatch)
    monkeypatch.setattr(nvenc, "encode_caps", nvenc_codec.encode_caps)
    encoders = nvenc.open_encoders(record)
    assert found_by(record)["rows"][1]["found"] == "hevc: 3 engines, 129x33 to 8192x8192"
    nvenc.check_bits(record, encoders, make_nvdec(FakeNvc(FakeDevice())).open_session(), ["smallest", "240p"])
    nvenc.measure(record, encoders, [1, 2], sizes=["240p"], seconds=0.05)
    found = found_by(record)
    assert not found["reason"]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        tables.setdefault(row["table"], []).append(row)
    bits = tables["NVENC: bits"]
    assert [row["size"] for row in bits] == ["smallest", "240p", "240p", "smallest"] * 2
    assert {row["found"] for row in bits} == {"equal"}
    assert {row["on_nvdec"] for row in bits} == {"equal"}
    assert all(0.5 < row["share_of_libx265s_bytes"] < 2 for row in bits)
    rates = tables["NVENC: throughput by sessions"]
    assert [row["sessions"] for row in rates] == [1, 2] * 2
    assert all(row["mb_of_values_a_second"] > 0 for row in rates)

    nvc.fails = "pixels"
    nvenc.check_bits(record, {"hevc": encoders["hevc"]}, {}, ["smallest"])
    assert found_by(record)["reason"] == "; ".join(["hevc smallest: other pixels"] * 2)
    nvc.fails = "missing"
    nvenc.check_bits(record, {"hevc": encoders["hevc"]}, {}, ["smallest"])
    assert "hevc smallest: NVENC made 0 pictures, expected 1" in found_by(record)["reason"]


def test_a_gpu_without_nvenc_is_skipped(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = fake_nvenc.install(monkeypatch)
    monkeypatch.setattr(nvenc, "encode_caps", nvenc_codec.encode_caps)
    nvc.fails = "pixels"
    with pytest.raises(SkippedError, match="a trial gave other pixels"):
        nvenc.open_encoders(record)
    assert "a trial gave other pixels" in found_by(record)["reason"]  # which is a failure
    monkeypatch.setattr(nvenc_codec, "encode_caps", dict)
    monkeypatch.setattr(nvenc, "encode_caps", dict)
    fresh = Record(record.path)
    with pytest.raises(SkippedError, match="it cannot encode losslessly"):
        nvenc.open_encoders(fresh)
    assert not found_by(fresh)["reason"]


def test_a_matrix_product_beside_decoding(record: Record) -> None:
    engines = make_nvdec(FakeNvc(FakeDevice()))
    decoders = [engines.open_session()["hevc"] for _ in range(2)]
    interference.measure(record, "hevc", decoders, CPU, 64, rounds=2, repeats=3)
    (row,) = found_by(record)["rows"]
    assert row["bitstreams_decoded_meanwhile"] > 0
    assert row["slower_percent"] == pytest.approx(100 * (row["beside_ms"] / row["alone_ms"] - 1), abs=1e-6)


async def test_a_fetch_into_the_pool_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device.cuda_pages import CudaPages

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    setup = Setup("uint8", "hevc", layers=1)
    segments = repeated_segments(setup, 2 * SPAN_TOKENS)
    await memory.store_segments(tmp_path, segments)
    device = FakeDevice()
    pool = memory.make_pool(setup, 2 * SPAN_TOKENS, "cpu")
    engines = make_nvdec(FakeNvc(device))
    sessions = [engines.open_session() for _ in range(2)]
    pages = CudaPages(pool, memory.PAGE_TOKENS, device, device.forward)
    num_pages, failures = await memory.fetch(
        tmp_path, setup, segments, pages, 2 * SPAN_TOKENS // memory.PAGE_TOKENS, sessions
    )
    assert (num_pages * memory.PAGE_TOKENS, failures) == (2 * SPAN_TOKENS, ())
    device.run()
    assert not memory.wrong_values(setup, segments[0], pages, 2 * SPAN_TOKENS)
    assert not memory.wrong_reads(pages, 3)
    pool.v_buffer[0][-1, 3, 5] += 1
    assert memory.wrong_values(setup, segments[0], pages, 2 * SPAN_TOKENS) == (
        "v of layer 0 differs from the CPU's values"
    )
    monkeypatch.setattr(pages, "read", lambda tensor, _: torch.zeros(3, memory.PAGE_TOKENS, 1, 8, 128))
    assert memory.wrong_reads(pages, 3) == "k of pages that were read differs from the pool's"
    monkeypatch.setattr(pages, "page_indices", lambda slots: [2, 1, 3])
    assert memory.wrong_reads(pages, 3) == "the slots' pages are [2, 1, 3], expected [1, 2, 3]"


def test_what_is_counted_for_surfaces_is_put_beside_what_is_held(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_pool.install_if_missing()
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(memory, "NUM_TOKENS", SPAN_TOKENS)
    monkeypatch.setattr(memory, "MAX_SEGMENT_TOKENS", SPAN_TOKENS)
    monkeypatch.setattr(memory, "_held_bytes", lambda: (0, 0))
    monkeypatch.setattr(memory, "_READ_PAGES", 2)
    monkeypatch.setattr(memory, "open_nvdec", lambda device: (make_nvdec(FakeNvc(device)), ""))
    setup = Setup("uint8", "hevc", layers=1)
    segments = repeated_segments(setup, SPAN_TOKENS)
    asyncio.run(memory.store_segments(tmp_path, segments))
    for on_nvdec in (True, False):
        device = FakeDevice()
        monkeypatch.setattr(torch.cuda, "synchronize", device.run)
        memory._measure(record, setup, segments, tmp_path, on_nvdec, device)  # type: ignore[arg-type]
    assert not found_by(record)["reason"]
    nvdec_row, cpu_row = found_by(record)["rows"]
    assert nvdec_row["surfaces_bound_mb"] == (256 << 20) / 1e6
    assert 0 < nvdec_row["surfaces_counted_mb"] <= nvdec_row["surfaces_bound_mb"]
    assert cpu_row["surfaces_counted_mb"] == cpu_row["surfaces_bound_mb"] == 0


def test_a_fetch_is_measured_beside_forward_passes(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_pool.install_if_missing()
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    monkeypatch.setattr(memory, "NUM_TOKENS", SPAN_TOKENS)
    monkeypatch.setattr(memory, "open_nvdec", lambda device: (make_nvdec(FakeNvc(device)), ""))
    monkeypatch.setattr(passes, "_MIN_S", 0.01)
    setup = Setup("uint8", "hevc", layers=1)
    segments = repeated_segments(setup, SPAN_TOKENS)
    asyncio.run(memory.store_segments(tmp_path, segments))
    device = FakeDevice()
    launched: dict[float, int] = {}

    def make_pass(seconds: float) -> Callable[[], None]:
        def launch() -> None:
            launched[seconds] = launched.get(seconds, 0) + 1

        return launch

    memory._measure_beside_passes(record, setup, segments, tmp_path, device, device.forward, make_pass)
    found = found_by(record)
    assert not found["reason"]
    assert list(launched) == list(passes.PASS_SECONDS)
    alone, *beside = found["rows"]
    assert [row["forward_passes"] for row in found["rows"]] == ["none", "10 ms", "50 ms", "200 ms"]
    assert alone["times_alone"] == 1
    for row in beside:
        assert row["times_alone"] == row["fetch_ms"] / alone["fetch_ms"]
        assert row["passes_meanwhile"] > 0
        assert 0 < row["pass_alone_ms"] <= row["longest_alone_ms"]
        assert 0 < row["pass_beside_ms"] <= row["longest_beside_ms"]
        assert row["longest_gap_ms"] > 0

    monkeypatch.setattr(memory, "wrong_values", lambda *_: "k of layer 0 differs")
    monkeypatch.setattr(passes, "PASS_SECONDS", ())
    memory._measure_beside_passes(record, setup, segments, tmp_path, device, device.forward, make_pass)
    assert "beside forward passes: k of layer 0 differs" in found_by(record)["reason"]
    monkeypatch.setattr(memory, "open_nvdec", lambda device: (None, "no engines"))
    memory._measure_beside_passes(record, setup, segments, tmp_path, device, device.forward, make_pass)
    assert "a fetch beside forward passes was not measured: no engines" in found_by(record)["notes"]


def test_a_forward_pass_is_launched_before_the_one_before_it_ends() -> None:
    device = FakeDevice()
    has_next: list[bool] = []
    enough = threading.Event()

    def launch_pass() -> None:
        has_next.append(launch_pass in device.forward.queue)
        if len(has_next) > 10:
            enough.set()

    with passes.running_passes(device, device.forward, launch_pass) as ends:
        assert ends  # at least one has ended
        assert enough.wait(WAIT_S)
    assert has_next == [True] * (len(ends) - 1) + [False]


def test_a_forward_pass_that_fails_ends_the_measurement() -> None:
    device = FakeDevice()
    with pytest.raises(ZeroDivisionError), passes.running_passes(device, device.forward, lambda: 1 / 0):
        pass


def test_sglang_that_cannot_run_on_a_gpu_is_skipped(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_NEEDED", ("torch", "no_such_kernels"))
    with pytest.raises(SkippedError, match="no_such_kernels not installed"):
        server.run(record)


@contextmanager
def pytest_that_ends(monkeypatch: pytest.MonkeyPatch, code: int) -> Iterator[None]:
    done = subprocess.CompletedProcess([], code, "...\n==== 1 failed, 2 passed ====\n", "")
    with monkeypatch.context() as patched:
        patched.setattr(tests, "subprocess", SimpleNamespace(run=lambda *_, **__: done))
        yield


def test_tests_that_need_a_gpu_are_found() -> None:
    found = set(tests.find_files())
    assert {"tests/tools/test_doctor_gpu.py", "tests/plugin/device/test_cuda_pages.py"} <= found
    assert "tests/codec/bitstream/test_codecs.py" not in found


def test_tests_that_fail_are_a_failure(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest_that_ends(monkeypatch, 0):
        tests.run(record)
    assert not found_by(record)["reason"]
    with pytest_that_ends(monkeypatch, 5), pytest.raises(SkippedError):
        tests.run(record)
    with pytest_that_ends(monkeypatch, 1):
        tests.run(record)
    assert found_by(record)["reason"] == "pytest ended with 1: 1 failed, 2 passed"
