"""The run of all that needs a GPU, without one: what it does then, and its parts over fakes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check import (
    __main__ as command,
    ans,
    driver_libraries,
    exact,
    first,
    interference,
    kernels,
    loads,
    nvdec,
    nvdec_damage,
    passes,
    prefixes,
    quantise,
)
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import STEPS, TOTAL_S, Result, Step, run_step
from benchmarks.kernel_bytes import Span
from harness import stand_in_pool
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.bitstream.nvdec import Nvdec
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.plugin.device import gpu_pages
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
from tests.codec.bitstream.fake_nvdec import FakeNvc, make_caps, make_nvdec
from tests.plugin.device.fake_streams import FakeDevice

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.process
def test_without_a_gpu_it_ends_well_and_names_what_it_skipped() -> None:
    before = sorted((ROOT / "out").glob("*"))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([ROOT / "scripts" / "gpu_check"], capture_output=True, text=True, timeout=WAIT_S, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["skipped", step.name] for step in STEPS if not step.is_extra]
    assert all("finds no usable CUDA GPU" in line for line in lines[:-1])
    assert lines[-1] == "no GPU: nothing was measured or written"
    assert sorted((ROOT / "out").glob("*")) == before


def test_all_steps_fit_into_the_time() -> None:
    assert sum(step.limit_s for step in STEPS if not step.is_extra) <= TOTAL_S <= 12 * 60


# A step's process


def run_one(name: str, folder: Path, limit_s: float = 20.0) -> Result:
    return run_step(Step(name, name, f"tests.benchmarks.gpu_steps:{name}", limit_s), folder, limit_s)


@pytest.mark.parametrize(
    ("name", "outcome", "reason"),
    [
        ("passes", "passed", ""),
        ("skips", "skipped", "nothing to see"),
        ("fails_twice", "failed", "first; second"),
        ("crashes", "failed", "before; killed by signal 11"),
    ],
)
def test_how_a_step_ends(name: str, outcome: str, reason: str, tmp_path: Path) -> None:
    result = run_one(name, tmp_path)
    assert (result.outcome, result.reason) == (outcome, reason)
    if name in ("passes", "crashes"):
        assert result.rows[0]["name"] == "one"


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


# What the steps do


def found_by(record: Record) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(record.path.read_text())
    return content


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return Record(tmp_path / "found.json")


TINY = [Span(17, heads=2, dim=16, coefficients=20)]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CASES = ["restore_klt", "restore_klt NeoX", "restore_klt GPT-J", *(f"restore_klt {dtype}" for dtype in FP8)]


def test_kernels_are_held_against_their_references(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert runtime.use_kernels(device)
    kernels.check(record, device, TINY)
    found = found_by(record)
    assert not found["reason"]
    assert [(row["kernel"], row["found"]) for row in found["rows"]] == [(name, "as the reference's") for name in CASES]

    def wrong(*arguments: Any, **options: Any) -> None:
        pass  # leaves the poison

    monkeypatch.setattr(kernels, "restore_klt", wrong)
    kernels.check(record, device, TINY)
    assert all(f"{name}, 17 tokens" in found_by(record)["reason"] for name in CASES)


def test_the_first_minute_shows_what_all_else_rests_on(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)  # the decoder's reference runs
    monkeypatch.setattr(kernels, "CHECKED", (None, *TINY))

    def get(found: Any, number: int, device: int) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = number
        return int(number == 40)

    first.read_attributes(record, get)
    first.check_cells(record, CPU)
    device = FakeDevice()
    first.measure_registering(record, device, 1 << 16, 1 << 14)
    found = found_by(record)
    assert not found["reason"]
    attributes, bits, registered = (
        [row for row in found["rows"] if row["table"] == name]
        for name in ("Attributes of the device", "Kernels: bits", "Registering shared memory")
    )
    assert [row["value"] for row in attributes] == [91, 99, 88, "error 1"]
    assert [row["kernel"] for row in bits] == [*CASES, "restore_exact"]
    assert [row["touched"] for row in registered] == [False, True]
    assert not device.pinned_memory
    monkeypatch.setattr(first, "fault_on_gpu", lambda device: "a trial gave other values")
    first.check_cells(record, CPU)
    assert found_by(record)["reason"] == "restore_exact: a trial gave other values"


def test_exact_is_held_against_its_values_and_measured(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)  # the decoder's reference runs
    tiny = exact.Cells(2, heads=1, dim=8, tokens=20)
    exact.check(record, CPU, (torch.bfloat16, torch.float8_e5m2))
    exact.measure(record, CPU, tiny)
    found = found_by(record)
    assert not found["reason"]
    *bits, speed = found["rows"]
    assert [row["found"] for row in bits] == ["as the values"] * 2
    assert speed["cells"] == 2
    assert speed["share_of_copy"] > 0
    monkeypatch.setattr(exact, "launch_exact", lambda *args: None)
    exact.measure(record, CPU, tiny)
    assert "have other values" in found_by(record)["reason"]


def test_ans_is_held_against_the_cpu_and_measured(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(ans, "_REPEATS", 1)
    tiny = [ans.Rows(1, 2, 48)]
    ans.check(record, device, tiny)
    ans.measure(record, device, tiny)
    found = found_by(record)
    assert not found["reason"]
    assert found["rows"][0]["found"] == "as the CPU's"
    assert found["rows"][1]["integers_gb_a_second"] > 0
    monkeypatch.setattr(ans, "ans_decode", lambda data, chunks, out: torch.zeros(len(chunks), dtype=torch.int32))
    ans.check(record, device, tiny)  # which leaves the poison
    assert "wrong bits, checksum, cut" in found_by(record)["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_quantising_is_held_against_the_cpu_and_measured(
    dtype: torch.dtype, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_pages, "_TRIAL_TOKENS", 16)  # the interpreter takes a second for 512
    quantise.check(record, FakeDevice(), num_tokens=16, dim=16, dtype=dtype)
    found = found_by(record)
    assert not found["reason"]
    assert found["rows"][0]["share_of_other_integers"] <= 0.005
    assert found["rows"][1]["kernels_us"] > 0

    right = KltCells.quantise

    def wrong(cells: KltCells, *args: Any) -> None:
        right(cells, *args)
        args[-1][len(cells.num_rows) :] ^= 1

    monkeypatch.setattr(KltCells, "quantise", wrong)
    quantise.check(record, FakeDevice(), num_tokens=16, dim=16, dtype=dtype)
    reason = found_by(record)["reason"]
    assert "a trial gave 100% other integers" in reason
    assert "of a cell's integers are not the CPU's" in reason


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
    assert found_by(record)["reason"] == "; ".join(["hevc smallest: other pixels"] * 2)


def test_throughput_is_measured_by_sessions(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    nvc = FakeNvc(FakeDevice())
    monkeypatch.setitem(nvdec.SIZES, "240p", (1, 144, 144))
    engines = Nvdec(nvc, nvc.device, {"hevc": make_caps(num_engines=2)})
    nvdec.measure(record, engines, [1, 4], {"240p": (2, 6)}, seconds=0.05)
    rows = found_by(record)["rows"]
    assert [row["sessions"] for row in rows] == [1, 4] * 2
    assert {row["latency"] for row in rows} == {"NATIVE"}
    assert rows[0]["share_of_sessions_times_one"] == 1.0
    assert 1 < rows[0]["bits_a_value"] < rows[2]["bits_a_value"] < 9
    for row in rows:
        assert row["mbit_a_second"] == pytest.approx(1e3 * row["gb_of_values_a_second"] * row["bits_a_value"])
        assert row["mbit_a_second_an_engine"] == row["mbit_a_second"] / min(2, row["sessions"])


def test_a_matrix_product_beside_decoding(record: Record) -> None:
    engines = make_nvdec(FakeNvc(FakeDevice()))
    decoders = [engines.open_session()["hevc"] for _ in range(2)]
    interference.measure(record, "hevc", decoders, CPU, 64, rounds=2, repeats=3)
    (row,) = found_by(record)["rows"]
    assert row["bitstreams_decoded_meanwhile"] > 0
    assert row["slower_percent"] == pytest.approx(100 * (row["beside_ms"] / row["alone_ms"] - 1), abs=1e-6)


def test_loads_are_checked_and_measured(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device import gpu_restores
    from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
    from sgl_kvfetch.plugin.device.gpu_pages import CudaRun

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    monkeypatch.setattr(loads, "SCRATCH_MIB", (1,))
    monkeypatch.setattr(passes, "_MIN_S", 0.01)
    monkeypatch.setattr(passes, "PASS_SECONDS", (0.01,))
    for module in (loads, prefixes):
        monkeypatch.setattr(module, "SPAN_TOKENS", num_tokens := 128)  # the interpreter runs restore_klt
    model, device = prefixes.Model(layers=3, dim=16), FakeDevice()
    launched: dict[float, int] = {}

    def make_pass(seconds: float) -> Callable[[], None]:
        def launch() -> None:
            launched[seconds] = launched.get(seconds, 0) + 1
            time.sleep(0.005)  # or the thread that launches passes would spin

        return launch

    loads.measure(record, model, num_tokens, device, device.forward, make_pass)
    loads.check_order(record, model, num_tokens, device, device.forward, "1")
    found = found_by(record)
    assert not found["reason"]
    assert list(launched) == list(passes.PASS_SECONDS)
    coded, alone, *beside, values = found["rows"]
    assert (coded["tokens"], coded["scratch_mib"]) == (num_tokens, 1)
    assert 0 < coded["launched_ms"] <= coded["ms"]
    assert [row["forward_passes"] for row in (alone, *beside)] == ["none", "10 ms"]
    assert alone["times_alone"] == 1
    for row in beside:
        assert row["times_alone"] == pytest.approx(row["load_ms"] / alone["load_ms"])
        assert row["passes_meanwhile"] > 0
        lost_ms = row["passes_meanwhile"] * (row["longest_beside_ms"] - row["pass_alone_ms"])
        assert row["passes_lose_ms"] <= lost_ms + 1e-6
        assert 0 < row["pass_alone_ms"] <= row["longest_alone_ms"]
        assert 0 < row["pass_beside_ms"] <= row["longest_beside_ms"]
        assert row["longest_gap_ms"] > 0
    assert values["gb_a_second"] > 0

    monkeypatch.setattr(passes, "PASS_SECONDS", ())
    monkeypatch.setattr(gpu_restores, "launch_klt", lambda *args: None)
    monkeypatch.setattr(GpuLoader, "_copy_values", lambda *args: iter(()))
    monkeypatch.setattr(CudaRun, "read", lambda *_: torch.ones(2, loads.PAGE_TOKENS, 3, 8, 16))
    loads.measure(record, model, num_tokens, device, device.forward, make_pass)
    loads.check_order(record, model, num_tokens, device, device.forward, "2")
    reason = found_by(record)["reason"]
    held_up = "coded cells, streams held up in order 2"
    for what in ("coded cells, 1 MiB of scratch memory", held_up, "coded cells beside forward passes", "values"):
        assert f"{what}: k of layer 0 differs by up to" in reason
    assert "k of pages that were read differs from the pool's" in reason


@pytest.mark.parametrize("coding", ["exact", "klt"])
def test_ranks_that_agree_on_fewer_pages_write_to_no_other_slot(
    coding: str, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.protocol.arena import StagedValues

    monkeypatch.setattr(runtime, "INTERPRETED", False)
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)
    for module in (loads, prefixes):
        monkeypatch.setattr(module, "SPAN_TOKENS", 128)
    model, device = prefixes.Model(layers=3, dim=16, coding=coding), FakeDevice()
    loads.check_agreed(record, model, 256, device, device.forward)
    found = found_by(record)
    assert not found["reason"]
    assert [row["pages"] for row in found["rows"]] == [f"range(0, {n})" for n in (4, 1, 3)] + ["range(1, 3)"]
    monkeypatch.setattr(StagedValues, "of_pages", lambda staged, pages, size: replace(staged, num_pages=len(pages)))
    loads.check_agreed(record, model, 256, device, device.forward)
    assert "pages range(1, 3) of 4: " in found_by(record)["reason"]


def test_side_pages_are_loaded_and_read(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_pool.install_if_missing()
    from sgl_kvfetch.plugin.device.pools import SideBuffers

    monkeypatch.setattr(loads, "SCRATCH_MIB", (1,))
    window = {"window_layers": 2, "window_tokens": 2 * loads.PAGE_TOKENS, "heads": 1, "dim": 16}
    sizes = loads.SideSizes(**window, state_values=64, key_layers=2, key_bytes=4)
    device = FakeDevice(1)
    loads.measure_sides(record, device, device.forward, sizes)
    found = found_by(record)
    assert not found["reason"]
    assert found["rows"][-1]["mb"] > 0
    monkeypatch.setattr(SideBuffers, "scatter", lambda *args: None)
    loads.measure_sides(record, device, device.forward, sizes)
    assert found_by(record)["reason"] == "; ".join(
        f"side pages: {count} of the pool {name} are other bytes, of which the first is 0"
        for name, count in (("swa", 2), ("mamba", 1), ("indexer", 2))
    )


def test_copies_at_once_are_held_against_copies_one_by_one(record: Record) -> None:
    device = FakeDevice()
    loads.measure_copies(record, device, 5, 100)
    found = found_by(record)
    assert not found["reason"]
    assert [(row["launched"], row["copies"]) for row in found["rows"]] == [("at once", 5), ("one by one", 5)]
    assert all(row["launch_cpu_us"] > 0 and row["gb_a_second"] > 0 for row in found["rows"])
    assert not device.pinned_memory

    class Forgetful(FakeDevice):
        def copy_ranges(self, *args: Any, is_pinned: bool = True) -> None:
            if not is_pinned:
                super().copy_ranges(*args)

    loads.measure_copies(record, Forgetful(), 5, 100)
    assert found_by(record)["reason"] == "copies of 5 ranges, at once: other bytes"
