"""The trial that chooses how `restore_klt` is compiled, in Triton's interpreter and with a clock of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from sgl_kvfetch.errors import UnsupportedError
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
    monkeypatch.setattr(klt_choice, "_COMPARED", 48)
    monkeypatch.setattr(klt_choice, "_COMPARED_SINGLY", 21)
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


def test_options_that_fail_or_give_other_values_than_the_cpu_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert (
        "not used with 128 tokens, 2 stages, 128 registers: it cannot be compiled or launched: RuntimeError: out of "
        "resource: shared memory" in caplog.text
    )
    for options in (OPTIONS[0], OPTIONS[3]):
        assert f"is not used with {options}: " in caplog.text
    assert caplog.text.count("of a trial's values are not the CPU's") == 2


def test_a_kept_choice_is_compared_at_each_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver or a card may have gone wrong since. Then the next one of that trial is taken, if it is right."""
    choose(Clock(OPTIONS[2]))

    def spoil(options: KltOptions, vector: int, k: torch.Tensor) -> None:
        if options == OPTIONS[2]:
            k.zero_()

    break_launches(monkeypatch, spoil)
    again = Clock(OPTIONS[4])
    assert choose(again)[0] == OPTIONS[0]
    assert not again.timed


def test_another_source_or_driver_is_another_choice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    choose(Clock(OPTIONS[2]))
    with monkeypatch.context() as patch:
        patch.setattr(klt_choice, "_driver", lambda: "580.95")
        assert choose(Clock(OPTIONS[1]))[0] == OPTIONS[1]
    changed = tmp_path / "restore_klt.py"
    changed.write_bytes(Path(restore_klt.__file__).read_bytes() + b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(restore_klt, "__file__", str(changed))
        assert choose(Clock(OPTIONS[3]))[0] == OPTIONS[3]
    assert choose(Clock(OPTIONS[1]))[0] == OPTIONS[2]


def test_without_options_that_pass_nothing_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt_choice, "launch_klt", lambda *args: 1 / 0)
    with pytest.raises(UnsupportedError, match="restore_klt: it cannot be compiled or launched: ZeroDivisionError"):
        choose(Clock(OPTIONS[2]))
    assert not choices()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_kernels_give_what_they_are_compared_with_in_each_dtype(dtype: torch.dtype) -> None:
    k, v = (torch.empty((64, 2, dim)).to(dtype) for dim in (16, 8))
    shape = klt_shape(k, v, 3, 8)
    for num_tokens in (klt_choice._COMPARED, klt_choice._COMPARED_SINGLY):
        assert klt_choice._compare(shape, dtype, 70, num_tokens, CPU).fault_of(OPTIONS[0]) == ""


def test_a_folder_that_cannot_be_written_costs_a_trial_at_each_start(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.write_text("a file")
    for _ in range(2):
        clock = Clock(OPTIONS[1])
        assert choose(clock)[0] == OPTIONS[1]
        assert clock.timed
    assert "is not kept" in caplog.text
