"""Calibration of a small random model: the weights foretell the divergence that is measured."""

import gc
import shutil
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness.layer_maps import plain_layers
from harness.models import make_tiny_lfm2, make_tiny_llama, make_tiny_mellum
from sgl_kvfetch.codec import CalibrationOptions, LayeredModel, Profile, calibrate_model, map_layers
from sgl_kvfetch.codec.calibrate import sweep
from sgl_kvfetch.codec.calibrate.sweep import Moments, Sweep
from sgl_kvfetch.codec.calibrate.text import (
    Kind,
    cut_windows,
    part_of,
    prompt_start,
    read_kinds,
    shared_out,
    tokenise,
)
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.prompts import text_digest
from sgl_kvfetch.types import CellGrid
from tests.codec.quant.profiles import CALIBRATION

CONTEXT, CONTINUATION = 256, 64
OPTIONS = CalibrationOptions(num_context=CONTEXT)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LayeredModel:
    path = make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=2, hidden_size=64, head_dim=32, vocab_size=256)
    _scale(path, "lm_head.weight", 0.02)  # random logits are far apart; these are as little sure as a trained model's
    return LayeredModel(str(path))


def _scale(path: Path, name: str, factor: float) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors[name] *= factor
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (CONTEXT + CONTINUATION,), generator=generator) for _ in range(10)]


@pytest.fixture(scope="module")
def profile(model: LayeredModel, windows: list[torch.Tensor]) -> Profile:
    return calibrate_model(model, {"text": windows}, map_layers(model)[0], CALIBRATION, OPTIONS)


def test_fine_steps_cost_by_their_square(profile: Profile) -> None:
    """A step of 1 would cost 1e-4 in a model like SmolLM2; in this one, whose logits are close together, less."""
    fine = [point for point in profile.curve if 5e-7 < point.kl < 5e-5]
    assert len(fine) >= 2
    for point in fine:
        assert 0.003 < point.kl / (1e-4 * point.step**2) < 1
    for finer, coarser in pairwise(fine):
        assert coarser.kl == pytest.approx(finer.kl * (coarser.step / finer.step) ** 2, rel=0.4)
    assert profile.curve[-1].kl < 2 * profile.context_kl  # forgetting it costs about as much as the coarsest step


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The layers that were passed. The first calibration is interrupted behind layer 0, which is noted as -1."""
    monkeypatch.setattr(sweep, "_EVERY_S", 0.0)
    passed: list[int] = []
    whole = Sweep.pass_layer

    def pass_layer(self: Sweep, index: int) -> Moments | None:
        if passed == [0]:
            passed.append(-1)
            raise KeyboardInterrupt
        passed.append(index)
        return whole(self, index)

    monkeypatch.setattr(Sweep, "pass_layer", pass_layer)
    return passed


def narrow(path: Path) -> Path:
    return make_tiny_llama(path, num_layers=2, hidden_size=64, head_dim=32, vocab_size=2048)


@pytest.mark.parametrize(
    ("make_model", "cell_layers", "rest"),
    [
        (narrow, 1, [1]),  # behind a layer group whose cells are fitted
        (narrow, 3, [1]),  # within one
        (make_tiny_lfm2, None, [1, 2, 3]),  # with what layers keep that are not coded: states
        (partial(make_tiny_mellum, window=16), None, [1, 2, 3]),  # ... and windows
    ],
    ids=["a group", "within a group", "states", "windows"],
)
def test_a_calibration_that_was_interrupted_goes_on(
    make_model: Callable[[Path], Path], cell_layers: int | None, rest: list[int], tmp_path: Path, passed: list[int]
) -> None:
    model, file = LayeredModel(str(make_model(tmp_path / "model"))), tmp_path / "unfinished"
    layers = map_layers(model)[0]
    generator = torch.Generator().manual_seed(0)
    windows = [torch.randint(3, 2048, (160,), generator=generator) for _ in range(5)]
    grid = None if cell_layers is None else CellGrid(2, 2, cell_layers, 2)

    def calibrate(part: list[torch.Tensor], file: Path | None) -> Profile:
        options = CalibrationOptions(num_context=128, grid=grid)
        return calibrate_model(model, {"text": part}, layers, CALIBRATION, options, unfinished=file)

    with pytest.raises(KeyboardInterrupt):
        calibrate(windows, file)
    assert file.exists()
    resumed = calibrate(windows, file)
    assert passed == [0, -1, *rest]
    assert not file.exists()
    whole = calibrate(windows, None)
    assert resumed.grid.num_layers == 2
    assert (resumed.digest, resumed.curve, resumed.layers) == (whole.digest, whole.curve, whole.layers)
    passed.clear()
    with pytest.raises(KeyboardInterrupt):
        calibrate(windows, file)
    calibrate([*windows[:3], windows[4], windows[3]], file)
    assert passed == [0, -1, 0, *rest]  # other windows: from the beginning


def test_kinds_of_text(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.txt", "b.txt", "c.jsonl", "d.txt")]
    for file in files:
        file.write_text(f'{{"prompt": "{file.stem}"}}')
    a, b, c, d = map(str, files)
    kinds, described = read_kinds([a, f"more={b}:0.25", f"more={c}:0.25", f"{d}:4e-1"])
    assert kinds == [
        Kind("a", ('{"prompt": "a"}',)),
        Kind("more", ('{"prompt": "b"}', "c"), 0.5),
        Kind("d", ('{"prompt": "d"}',), 0.4),
    ]
    assert described.startswith(f"a.txt ({text_digest(files[0])}), b.txt (")
    for file, message in ((files[0], "is empty"), (files[2], "holds no prompts")):
        file.write_text("\n")
        with pytest.raises(ConfigError, match=message):
            read_kinds([str(file)])


def test_windows_are_shared_out() -> None:
    """By the shares, as near as whole windows come, and at least two for each."""

    def numbers(num_windows: int, *shares: float | None) -> list[int]:
        return shared_out([Kind(f"k{i}", (), share) for i, share in enumerate(shares)], num_windows)

    assert numbers(25, None) == [25]
    assert numbers(25, None, None) == [13, 12]
    assert numbers(25, 0.5, None, None) == [13, 6, 6]
    assert numbers(10, 0.9, 0.05, 0.05) == [6, 2, 2]
    assert numbers(36, *[None] * 9) == [4] * 9
    assert numbers(7, 0.01, 0.01, None) == [2, 2, 3]
    for shares, message in (
        ((0.5, 0.6), "add up to 1.1: expected 1 in all"),
        ((0.5, 0.5, None), "and leave some for texts without one"),
        ([None] * 65, "there are 65 kinds of text, expected 64 at most"),
        ([None] * 6, "6 kinds of text need 12 windows or more"),
    ):
        with pytest.raises(ConfigError, match=message):
            numbers(11, *shares)


def test_windows_do_not_overlap() -> None:
    texts = [torch.arange(100), torch.arange(100, 125), torch.arange(200, 205)]
    none = torch.tensor([], dtype=torch.long)
    windows = cut_windows(texts, 7, 10, none)
    assert all(len(w) == 10 and (w.diff() == 1).all() for w in windows)
    seen = torch.cat(windows)
    assert len(seen.unique()) == 70
    assert seen.max() >= 100
    with pytest.raises(ConfigError, match=r"has 12 windows of 10 tokens, expected 13 .* the longest of 3 has 100 tok"):
        cut_windows(texts, 13, 10, none)
    assert part_of(texts[0], "0.5:0.9").tolist() == [*range(50, 90)]
    # Each begins as a prompt does.
    windows = cut_windows(texts[:1], 3, 34, torch.tensor([7]))
    assert [(*w[:2].tolist(), len(w)) for w in windows] == [(7, 0, 34), (7, 33, 34), (7, 66, 34)]
    with pytest.raises(ConfigError, match="hold only the start of every prompt"):
        cut_windows(texts[:1], 1, 2, torch.tensor([7, 8]))


@pytest.mark.parametrize(("template", "start"), [("<s> $A", [1]), ("<s> <s> $A", [1, 1]), ("$A </s>", [])])
def test_what_prompts_begin_with(tmp_path: Path, template: str, start: list[int]) -> None:
    from tokenizers.processors import TemplateProcessing
    from transformers import AutoTokenizer

    path = make_tiny_llama(tmp_path, num_layers=1, hidden_size=64, head_dim=32, vocab_size=16)
    tokenizer = AutoTokenizer.from_pretrained(path)
    special_tokens = [("<s>", 1), ("</s>", 2)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=special_tokens)
    assert prompt_start(tokenizer).tolist() == start
    assert tokenise(tokenizer, "w5 w3").tolist() == [5, 3]
    assert tokenise(tokenizer, "<s> w5 w3").tolist() == ([5, 3] if start == [1] else [1, 5, 3])
    assert tokenise(tokenizer, "").tolist() == []


O_PROJ = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("names", "scale", "message"),
    [
        (O_PROJ, 0.0, "does not depend on K"),
        (O_PROJ, float("inf"), "gradients of K are not finite"),
        (("lm_head.weight",), float("nan"), "log probabilities contain NaN"),
    ],
)
def test_a_model_that_cannot_be_calibrated_is_named(
    model: LayeredModel, windows: list[torch.Tensor], names: tuple[str, ...], scale: float, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(model.path, path)
    for name in names:
        _scale(path, name, scale)
    layers = plain_layers(model.num_layers)
    with pytest.raises(ConfigError, match=message):
        calibrate_model(LayeredModel(str(path)), {"text": windows[:2]}, layers, CALIBRATION, OPTIONS)


def live_storages() -> dict[int, int]:
    """Return the address and the bytes of all memory that tensors have."""
    types = torch.Tensor, torch.nn.Parameter
    tensors = (x for x in gc.get_objects() if type(x) in types and x.device.type == "cpu")
    storages = (x.untyped_storage() for x in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def peak_and_kept_bytes(folder: Path, num_layers: int) -> tuple[int, int]:
    """Calibrate a model. Return the most bytes that tensors had between two layers, and those of what has to stay: the
    profile, and the held-out context's K and V."""
    path = make_tiny_llama(folder, num_layers=num_layers, hidden_size=64, head_dim=32, vocab_size=64)
    model = LayeredModel(str(path))
    layers = map_layers(model)[0]
    windows = list(torch.randint(3, 64, (2, 256 + 16), generator=torch.Generator().manual_seed(0)))
    before = live_storages()
    peak = 0

    def watched(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
        nonlocal peak
        for step in steps:
            yield step
            peak = max(peak, sum(size for address, size in live_storages().items() if address not in before))

    options = CalibrationOptions(num_context=256, max_channels=3 * 64, tp_size=2)  # three layers of one head a cell
    profile = calibrate_model(model, {"text": windows}, layers, CALIBRATION, options, watched)
    assert profile.grid.num_layer_groups == num_layers // 3
    context_bytes = 256 * num_layers * model.num_heads * 64 * 2
    return peak, sum(x.nbytes for x in profile._tensors().values()) + context_bytes


@pytest.mark.slow
def test_only_the_profile_and_held_out_values_grow_with_the_layers(tmp_path: Path) -> None:
    """Neither the sums of products that transforms are made from nor the matrices that restore the held-out context
    are kept for all layers."""
    few_peak, few_kept = peak_and_kept_bytes(tmp_path / "few", 3)
    many_peak, many_kept = peak_and_kept_bytes(tmp_path / "many", 12)
    assert many_kept > 3.9 * few_kept
    assert many_peak - few_peak < 1.2 * (many_kept - few_kept)
