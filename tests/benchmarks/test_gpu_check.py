"""The run of all that needs a GPU, without one; and its steps over fakes, each also with a fault that it must find."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from benchmarks.gpu_check import (
    __main__ as command,
    ans,
    driver_libraries,
    exact,
    first,
    kernels,
    loads,
    passes,
    prefixes,
    quantise,
)
from benchmarks.gpu_check.kernels import Span
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.runner import STEPS, TOTAL_S, Result, Step, run_step
from harness.waiting import WAIT_S
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.plugin.device import gpu_pages, gpu_restores
from sgl_kvfetch.plugin.device.pools import SideBuffers
from sgl_kvfetch.protocol.arena import StagedValues
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells
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
    assert [line.split()[:2] for line in lines[:-1]] == [["skipped", step.name] for step in STEPS]
    assert all("finds no usable CUDA GPU" in line for line in lines[:-1])
    assert lines[-1] == "no GPU: nothing was measured or written"
    assert sorted((ROOT / "out").glob("*")) == before


def test_all_steps_exist_and_fit_into_the_time() -> None:
    for step in STEPS:
        module, _, function = step.runs.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert sum(step.limit_s for step in STEPS) <= TOTAL_S <= 12 * 60


def crashes(record: Record) -> None:
    record.row("numbers", name="one")
    record.fail("before")
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_step_that_crashes_keeps_what_it_recorded(tmp_path: Path) -> None:
    result = run_step(Step("crashes", "", f"{__name__}:crashes", 60.0), tmp_path, 60.0)
    assert (result.outcome, result.reason) == ("failed", "before; killed by signal 11")
    assert [row["name"] for row in result.rows] == ["one"]


def test_a_run_goes_on_after_a_failure_and_writes_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"table": "Machine", "what": "gpu", "is": "NVIDIA H100"}]
    ends = {
        "machine": Result("machine", "Machine", "passed", rows=rows),
        "kernels": Result("kernels", "Kernels", "failed", "killed by signal 11", log_tail="last words"),
    }
    monkeypatch.setattr(command, "run_step", lambda step, *_: ends.get(step.name, Result(step.name, "", "passed")))
    monkeypatch.setattr(driver_libraries, "complete", lambda folder: ["a library was missing"])
    assert command.main(["--out", str(tmp_path), "--only", "kernels", "tests"]) == 1
    content = json.loads((tmp_path / "nvidia-h100.json").read_text())
    assert [step["outcome"] for step in content["steps"]] == ["passed", "failed", "passed"]
    page = (tmp_path / "nvidia-h100.md").read_text()
    assert "| Kernels | failed | 0 | killed by signal 11 |" in page
    assert "* machine: a library was missing" in page


# What the steps do


class Check(NamedTuple):
    """A part of a step on this machine. ``faults``: attributes, and what takes their places; then the part fails, and
    says ``reasons``."""

    run: Callable[[Record], object]
    faults: Sequence[tuple[Any, str, Any]] = ()
    reasons: Sequence[str] = ()


TINY = [Span(17, heads=2, dim=16, coefficients=20)]
NUM_TOKENS = 128  # of a span


def nothing(*arguments: Any, **options: Any) -> None:
    """Leaves the poison."""


def check_ans(record: Record) -> None:
    ans.check(record, CPU, [ans.Rows(1, 2, 48)])
    ans.measure(record, CPU, [ans.Rows(1, 2, 48)])


def check_exact(record: Record) -> None:
    exact.check(record, CPU, (torch.bfloat16, torch.float8_e5m2))
    exact.measure(record, CPU, exact.Cells(2, heads=1, dim=8, tokens=20))


def check_quantised(dtype: torch.dtype, record: Record) -> None:
    quantise.check(record, FakeDevice(), num_tokens=16, dim=16, dtype=dtype)


def quantise_wrongly(cells: KltCells, *args: Any, right: Any = KltCells.quantise) -> None:
    right(cells, *args)
    args[-1][len(cells.num_rows) :] ^= 1


def check_first(record: Record) -> None:
    def get(found: Any, number: int, device: int) -> int:
        ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = number
        return int(number == 40)

    first.read_attributes(record, get)
    first.check_cells(record, CPU)
    first.measure_registering(record, FakeDevice(), 1 << 16, 1 << 14)


def make_pass(seconds: float) -> Callable[[], None]:
    return lambda: time.sleep(0.005)  # or the thread that launches passes would spin


def check_loads(record: Record) -> None:
    model, device = prefixes.Model(layers=3, dim=16), FakeDevice()
    loads.measure(record, model, NUM_TOKENS, device, device.forward, make_pass)
    loads.check_order(record, model, NUM_TOKENS, device, device.forward, "1")


def check_agreed(coding: str, record: Record) -> None:
    device = FakeDevice()
    loads.check_agreed(record, prefixes.Model(layers=3, dim=16, coding=coding), 2 * NUM_TOKENS, device, device.forward)


def all_of(staged: StagedValues, pages: range, page_size: int) -> StagedValues:
    return replace(staged, num_pages=len(pages))


def check_sides(record: Record) -> None:
    window = {"window_layers": 2, "window_tokens": 2 * loads.PAGE_TOKENS, "heads": 1, "dim": 16}
    device = FakeDevice(1)
    sizes = loads.SideSizes(**window, state_values=64, key_layers=2, key_bytes=4)
    loads.measure_sides(record, device, device.forward, sizes)


def forget_copies(device: FakeDevice, *args: Any, is_pinned: bool = True, right: Any = FakeDevice.copy_ranges) -> None:
    if not is_pinned:
        right(device, *args)


WRONG_INTEGERS = [(KltCells, "quantise", quantise_wrongly)]
CHECKS = {
    "kernels": Check(
        lambda record: kernels.check(record, CPU, TINY),
        [(kernels, "restore_klt", nothing)],
        ["restore_klt, 17 tokens", "restore_klt GPT-J, 17 tokens", "restore_klt torch.float8_e5m2, 17 tokens"],
    ),
    "ans": Check(
        check_ans,
        [(ans, "ans_decode", lambda data, chunks, out: torch.zeros(len(chunks), dtype=torch.int32))],
        ["wrong bits, checksum, cut"],
    ),
    "exact": Check(check_exact, [(exact, "launch_exact", nothing)], ["have other values"]),
    "quantise": Check(
        partial(check_quantised, torch.bfloat16), WRONG_INTEGERS, ["a trial gave", "integers are not the CPU's"]
    ),
    "quantise fp8": Check(partial(check_quantised, torch.float8_e4m3fn), WRONG_INTEGERS, ["are not the CPU's"]),
    "first": Check(check_first, [(first, "fault_on_gpu", lambda device: "other values")], ["restore_exact: other"]),
    "loads": Check(
        check_loads,
        [
            (gpu_restores, "launch_klt", nothing),
            (gpu_pages.CudaRun, "read_into", lambda run, pages, memory, offset: memory.fill_(1)),
        ],
        ["streams held up in order 1: k of layer 0 differs", "k of pages that were read differs from the pool's"],
    ),
    "ranks, exact": Check(partial(check_agreed, "exact")),
    "ranks, klt": Check(
        partial(check_agreed, "klt"), [(StagedValues, "of_pages", all_of)], ["klt, pages range(1, 3) of 4: "]
    ),
    "sides": Check(check_sides, [(SideBuffers, "scatter", nothing)], ["2 of the pool swa are other bytes"]),
    "copies": Check(
        lambda record: loads.measure_copies(record, FakeDevice(), 5, 100),
        [(FakeDevice, "copy_ranges", forget_copies)],
        ["copies of 5 ranges, at once: other bytes"],
    ),
}


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_passes_and_finds_a_fault(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", "quantise" in name)  # else references run
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    for module in (loads, prefixes):
        monkeypatch.setattr(module, "SPAN_TOKENS", NUM_TOKENS)
    for holder, constant, value in (
        (ans, "_REPEATS", 1),
        (gpu_pages, "_TRIAL_TOKENS", 16),
        (kernels, "CHECKED", (None, *TINY)),
        (loads, "SCRATCH_MIB", (1,)),
        (passes, "_MIN_S", 0.01),
        (passes, "PASS_SECONDS", (0.01,)),
    ):
        monkeypatch.setattr(holder, constant, value)
    check = CHECKS[name]

    def found() -> dict[str, Any]:
        record = Record(tmp_path / "found.json")
        check.run(record)
        content: dict[str, Any] = json.loads(record.path.read_text())
        return content

    assert not (passed := found())["reason"]
    assert passed["rows"]
    for fault in check.faults:
        monkeypatch.setattr(*fault)
    reason = found()["reason"] if check.faults else ""
    assert all(each in reason for each in check.reasons), reason
