"""The trial that chooses how `restore_klt` is compiled, in Triton's interpreter and with a clock of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from sgl_kvfetch.triton_kernels import klt_choice, restore_klt
from sgl_kvfetch.triton_kernels.klt_choice import choices, choose_by, chosen
from sgl_kvfetch.triton_kernels.restore_klt import OPTIONS, KltOptions, klt_shape

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "kvfetch" / "restore_klt.json"
    monkeypatch.setattr(klt_choice, "_path", lambda: found)
    monkeypatch.setattr(klt_choice, "_TOKENS", 32)
    monkeypatch.setattr(klt_choice, "_CELLS", 2)
    return found


class Clock:
    """Says that one option is the fastest."""

    def __init__(self, fastest: KltOptions) -> None:
        self._fastest = fastest
        self.timed: list[KltOptions] = []

    def __call__(self, launch: Callable[[], object]) -> float:
        options: KltOptions = launch.args[3]  # type: ignore[attr-defined]
        self.timed.append(options)
        return 150e-6 if options == self._fastest else 281e-6


def choose(clock: Clock, coefficients: int = 70) -> tuple[KltOptions, str]:
    k, v = (torch.empty((64, 4, dim), dtype=torch.bfloat16)[:, :2] for dim in (16, 8))
    return choose_by(clock, klt_shape(k, v, 2, 16, mixed=True), torch.bfloat16, coefficients, CPU, "a card")


def test_the_fastest_options_are_chosen_once(path: Path) -> None:
    clock = Clock(OPTIONS[2])
    options, about = choose(clock)
    assert options == OPTIONS[2]
    assert clock.timed == list(OPTIONS)
    assert "compiled with 128 tokens, 2 stages, 128 registers, transposed, chosen in a trial of" in about
    assert (
        ", 2 stages 281, 128 tokens, 2 stages, 128 registers 281, 128 tokens, 2 stages, 128 registers, transposed 150"
        in about
    )
    again = Clock(OPTIONS[0])
    assert choose(again)[0] == OPTIONS[2]
    assert "as in an earlier trial" in choose(again)[1]
    assert not again.timed
    assert choose(again, coefficients=64)[0] == OPTIONS[0]
    assert len(again.timed) == len(OPTIONS)
    assert len(choices()) == 2
    assert all(key.startswith("a card, Triton ") for key in choices())
    with_triton = f"Triton {triton.__version__}"
    assert chosen("a card") == [
        f"{OPTIONS[2]} ({with_triton}, 70 coefficients; 150 us a column of cells)",
        f"{OPTIONS[0]} ({with_triton}, 64 coefficients; 150 us a column of cells)",
    ]
    assert not chosen("another card")
    assert [each.name for each in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"KEY": {"other options": 1.0}}', '{"KEY": []}'])
def test_what_is_no_choice_is_made_again(content: str, path: Path) -> None:
    choose(Clock(OPTIONS[1]))
    (key,) = choices()
    path.write_text(content.replace("KEY", key.replace('"', '\\"')))
    assert choose(Clock(OPTIONS[3]))[0] == OPTIONS[3]
    assert len(json.loads(path.read_text())) == 1


def test_options_that_fail_or_give_other_bits_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    real = restore_klt.launch_klt

    def launch(shape: Any, dtype: Any, vector: int, options: KltOptions, *args: Any) -> None:
        if options == OPTIONS[1]:
            raise RuntimeError("out of resource: shared memory")
        real(shape, dtype, vector, options, *args)
        if options == OPTIONS[3]:
            trial[0].model.k[0][0, 0, 0] += 1

    trial: list[restore_klt.KltCell] = []
    cell = klt_choice.made_up_cell
    made = lambda *args: trial.append(cell(*args)) or trial[0]  # type: ignore[func-returns-value]  # noqa: E731
    monkeypatch.setattr(klt_choice, "made_up_cell", made)
    monkeypatch.setattr(klt_choice, "launch_klt", launch)
    clock = Clock(OPTIONS[2])
    assert choose(clock)[0] == OPTIONS[2]
    assert clock.timed == [OPTIONS[0], OPTIONS[2], OPTIONS[4]]
    assert (
        "cannot be compiled with 128 tokens, 2 stages, 128 registers: RuntimeError: out of resource: shared memory"
        in caplog.text
    )
    assert "with 256 tokens, 2 stages, 128 registers adds up in another order" in caplog.text


def test_without_a_trial_that_passes_the_default_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt_choice, "launch_klt", lambda *args: 1 / 0)
    clock = Clock(OPTIONS[2])
    options, about = choose(clock)
    assert options == OPTIONS[0]
    assert "no options passed a trial" in about
    assert not choices()


def test_a_folder_that_cannot_be_written_costs_a_trial_at_each_start(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file")
    for _ in range(2):
        clock = Clock(OPTIONS[1])
        assert choose(clock)[0] == OPTIONS[1]
        assert clock.timed
    assert "is not kept" in caplog.text
