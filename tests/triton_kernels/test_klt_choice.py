"""The trial that chooses how `restore_klt` is compiled, in Triton's interpreter and with a clock of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels import klt_choice, restore_klt
from sgl_kvfetch.triton_kernels.klt_choice import choose_by
from sgl_kvfetch.triton_kernels.restore_klt import OPTIONS, KltOptions, klt_shape

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"_TOKENS": 32, "_CELLS": 2, "_COMPARED": 48, "_COMPARED_SINGLY": 21}.items():
        monkeypatch.setattr(klt_choice, name, number)


class Clock:
    """Says that one option is the fastest."""

    def __init__(self, fastest: KltOptions) -> None:
        self._fastest = fastest
        self.timed: list[KltOptions] = []

    def __call__(self, launch: Callable[[], object]) -> float:
        options: KltOptions = launch.args[0]  # type: ignore[attr-defined]
        self.timed.append(options)
        return 150e-6 if options == self._fastest else 281e-6


def choose(clock: Clock) -> tuple[KltOptions, str]:
    k, v = (torch.empty((64, 4, dim), dtype=torch.bfloat16)[:, :2] for dim in (16, 8))
    return choose_by(clock, klt_shape(k, v, 2, 16, mixed=True), torch.bfloat16, 70, CPU)


def test_the_fastest_options_are_chosen() -> None:
    clock = Clock(OPTIONS[2])
    options, about = choose(clock)
    assert options == OPTIONS[2]
    assert clock.timed == list(OPTIONS)
    assert "compiled with 128 tokens, 2 stages, 128 registers, transposed, chosen in a trial of" in about


def break_launches(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[KltOptions, int, torch.Tensor], None]) -> None:
    """Let ``spoil`` change what kernels have written: of which options and vector, and a layer's K."""
    real, compared = restore_klt.launch_klt, klt_choice._compare
    cells: dict[int, restore_klt.KltCell] = {}

    def compare(*args: Any) -> Any:
        found = compared(*args)
        cells[found.cell.num_tokens] = found.cell
        return found

    def launch(shape: Any, dtype: Any, vector: int, options: KltOptions, *args: Any) -> None:
        real(shape, dtype, vector, options, *args)
        if (cell := cells.get(args[3])) is not None:
            spoil(options, vector, cell.model.k[0])

    monkeypatch.setattr(klt_choice, "_compare", compare)
    monkeypatch.setattr(klt_choice, "launch_klt", launch)


def test_options_that_fail_or_give_other_values_than_the_cpu_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is compared like all others. So are slots that nobody should write to, and exact tokens."""

    def spoil(options: KltOptions, vector: int, k: torch.Tensor) -> None:
        if options == OPTIONS[1]:
            raise RuntimeError("out of resource: shared memory")
        if options == OPTIONS[0]:
            written = k.abs().sum(dim=(1, 2)).nonzero()
            k[written[0]] += 1
        if options == OPTIONS[3] and vector == 1:
            unwritten = (k.abs().sum(dim=(1, 2)) == 0).nonzero()
            k[unwritten[-1]] = 0.5

    break_launches(monkeypatch, spoil)
    clock = Clock(OPTIONS[2])
    assert choose(clock)[0] == OPTIONS[2]
    assert clock.timed == [OPTIONS[2], OPTIONS[4]]


def test_without_options_that_pass_nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt_choice, "launch_klt", lambda *args: 1 / 0)
    with pytest.raises(UnsupportedError, match="restore_klt: it cannot be compiled or launched: ZeroDivisionError"):
        choose(Clock(OPTIONS[2]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_kernels_give_what_they_are_compared_with_in_each_dtype(dtype: torch.dtype) -> None:
    k, v = (torch.empty((64, 2, dim)).to(dtype) for dim in (16, 8))
    shape = klt_shape(k, v, 3, 8)
    for num_tokens in (klt_choice._COMPARED, klt_choice._COMPARED_SINGLY):
        assert klt_choice._compare(shape, dtype, 70, num_tokens, CPU).fault_of(OPTIONS[0]) == ""
