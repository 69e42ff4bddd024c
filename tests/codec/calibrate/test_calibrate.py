"""Calibration of a small random model: the Fisher information foretells the divergence that is measured."""

import shutil
from itertools import pairwise
from math import log
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from harness.models import make_tiny_llama
from sgl_kvfetch.codec.calibrate.fit import CalibrationOptions, calibrate_model, measure_curve
from sgl_kvfetch.codec.calibrate.model import KVModel, cut_windows, find_rope, part_of, prompt_start, tokenise
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.prompts import read_texts
from sgl_kvfetch.types import CellGrid
from tests.codec.quant.profiles import CALIBRATION

CONTEXT, CONTINUATION = 256, 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> KVModel:
    path = make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=2, hidden_size=64, head_dim=32, vocab_size=256)
    model = KVModel(str(path))
    model.model.lm_head.weight.mul_(0.02)  # random logits are far apart; these are as little sure as a trained model's
    return model


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 256, (CONTEXT + CONTINUATION,), generator=generator) for _ in range(10)]


@pytest.fixture(scope="module")
def profile(model: KVModel, windows: list[torch.Tensor]) -> Profile:
    return calibrate_model(model, windows, find_rope(model), CALIBRATION, CalibrationOptions(num_context=CONTEXT))


def test_the_profile_has_the_models_shape(model: KVModel, profile: Profile) -> None:
    assert profile.grid == CellGrid(num_layers=2, num_heads=2, cell_layers=3, cell_heads=2)
    assert profile.cells[0, 0].num_channels == 2 * 2 * (32 + 32)


def test_fine_steps_cost_what_was_foretold(profile: Profile) -> None:
    """The cost grows with the step's square. A step of 1 is meant to cost 1e-4; it costs less, since calibration takes
    directions for costlier than they were measured to be."""
    fine = [point for point in profile.curve if 0.05 < point.step < 1]
    assert len(fine) == 3
    for point in fine:
        assert 0.3 < point.kl / (1e-4 * point.step**2) < 1
    for finer, coarser in pairwise(fine):
        assert coarser.kl == pytest.approx(finer.kl * (coarser.step / finer.step) ** 2, rel=0.25)


def test_gradients_in_bfloat16_do_as_well(
    model: KVModel, windows: list[torch.Tensor], profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights come in bfloat16, as most do. The accuracy is measured in float32 all the same.

    Machines round bfloat16 differently, and this model's few windows turn that into up to 4% of the bits.
    """
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    path = Path(model.path).parent / "bfloat16"
    shutil.copytree(model.path, path)
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    low = KVModel(str(path), dtype=None)
    assert low.model.dtype == torch.bfloat16
    low.model.lm_head.weight.mul_(0.02)
    found = calibrate_model(low, windows, profile.rope, CALIBRATION, CalibrationOptions(num_context=CONTEXT))
    assert low.model.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in low.inverse_frequencies())
    measured = measure_curve(model, found, windows[:2], CONTEXT)
    for kl in (2e-5, 2e-4):
        assert bits_at(measured, kl) == pytest.approx(bits_at(profile, kl), rel=0.1)


@pytest.mark.parametrize("capability", ["avx512_bf16", "avx2"])
def test_weights_in_float32_stay_so(model: KVModel, capability: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    assert KVModel(model.path, dtype=None).model.dtype == torch.float32


def test_wider_cells_need_fewer_bits(model: KVModel, windows: list[torch.Tensor], profile: Profile) -> None:
    narrow = calibrate_model(
        model, windows, profile.rope, CALIBRATION, CalibrationOptions(num_context=CONTEXT, max_channels=1, tp_size=2)
    )
    assert narrow.grid.cell_heads == 1
    assert bits_at(profile, 2e-4) < bits_at(narrow, 2e-4) - 0.05


def test_the_default_is_a_share_of_what_the_context_is_worth(profile: Profile) -> None:
    assert profile.curve[-1].kl < 2 * profile.context_kl  # forgetting it costs about as much as the coarsest step
    assert profile.default_target_kl == pytest.approx(1e-3 * profile.context_kl)
    profile.step_for(None)


def bits_at(profile: Profile, kl: float) -> float:
    for low, high in pairwise(profile.curve):
        if kl <= high.kl:
            part = log(kl / low.kl) / log(high.kl / low.kl)
            return low.bits_per_value + part * (high.bits_per_value - low.bits_per_value)
    raise AssertionError(f"{kl} is above {profile.curve[-1].kl}")


def test_the_curve_is_measured_on_what_is_given(model: KVModel, windows: list[torch.Tensor], profile: Profile) -> None:
    again = measure_curve(model, profile, windows[:2], CONTEXT)
    assert again.curve == profile.curve
    other = measure_curve(model, profile, windows[2:4], CONTEXT)
    assert other.curve != profile.curve
    assert other.digest == profile.digest


def test_one_window_is_too_little(model: KVModel, windows: list[torch.Tensor]) -> None:
    with pytest.raises(ConfigError, match="two windows"):
        calibrate_model(model, windows[:1], None, CALIBRATION, CalibrationOptions(num_context=CONTEXT))


def test_what_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no model with a tokenizer at '{tmp_path}'"):
        KVModel(str(tmp_path))


def test_a_model_without_plain_attention_is_refused(model: KVModel, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    state = SimpleNamespace(past_key_values=SimpleNamespace(layers=[SimpleNamespace()]))
    monkeypatch.setattr(model, "model", lambda *args, **kwargs: state)
    with pytest.raises(UnsupportedError, match="plain attention"):
        model.kv(torch.zeros(1, dtype=torch.long))


def test_texts(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\ntwo\n")
    lines.write_text('{"prompt": "one"}\n\n{"prompt": "two", "more": 1}\n')
    assert read_texts(plain) == ["one\ntwo\n"]
    assert read_texts(lines) == ["one", "two"]
    for content, message in (
        ('{"prompt": 1}', r"b.jsonl:1: expected an object with a string 'prompt'"),
        ("{", r"b.jsonl:1: expected an object .* truncated"),
        ("\n", "holds no prompts"),
    ):
        lines.write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_texts(lines)
    plain.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_texts(plain)
    with pytest.raises(ConfigError, match="No such file"):
        read_texts(tmp_path / "c.txt")


def test_windows_do_not_overlap() -> None:
    texts = [torch.arange(100), torch.arange(100, 125), torch.arange(200, 205)]
    none = torch.tensor([], dtype=torch.long)
    windows = cut_windows(texts, 7, 10, none)
    assert all(len(w) == 10 and (w.diff() == 1).all() for w in windows)
    seen = torch.cat(windows)
    assert len(seen.unique()) == 70
    assert seen.max() >= 100
    with pytest.raises(ConfigError, match="has 12 windows of 10 tokens, expected 13"):
        cut_windows(texts, 13, 10, none)


def test_every_window_begins_as_a_prompt_does() -> None:
    windows = cut_windows([torch.arange(100)], 3, 34, torch.tensor([7]))
    assert [w[:2].tolist() for w in windows] == [[7, 0], [7, 33], [7, 66]]
    assert {len(w) for w in windows} == {34}
    with pytest.raises(ConfigError, match="hold only the start of every prompt"):
        cut_windows([torch.arange(100)], 1, 2, torch.tensor([7, 8]))


@pytest.mark.parametrize(
    ("template", "start"), [("$A", []), ("<s> $A", [1]), ("<s> <s> $A", [1, 1]), ("$A </s>", []), ("<s> $A </s>", [1])]
)
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


@pytest.mark.parametrize("model_type", ["mistral", "gemma2"])
def test_a_cache_that_forgets_is_refused(tmp_path: Path, model_type: str) -> None:
    """In all layers, or in every other one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    make_tiny_llama(tmp_path, num_layers=1, hidden_size=64, head_dim=32, vocab_size=128)  # for its tokenizer
    config = AutoConfig.for_model(
        model_type,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=32,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = KVModel(str(tmp_path))
    assert model.kv(torch.arange(3, 20))[0].shape == (17, 2, 2, 32)
    with pytest.raises(UnsupportedError, match="its cache keeps 31 of 64 tokens, those in its sliding window"):
        model.kv(torch.arange(3, 67))


@pytest.mark.parametrize(
    ("scale", "message"), [(0.0, "does not depend on K"), (float("inf"), "gradients of K are not finite")]
)
def test_a_model_that_no_transform_can_be_made_from_is_named(
    model: KVModel, windows: list[torch.Tensor], scale: float, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = model.log_probabilities

    def scaled(k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        log_p = exact(k, v, ids)
        log_p.register_hook(lambda gradient: gradient * scale)
        return log_p

    monkeypatch.setattr(model, "log_probabilities", scaled)
    with pytest.raises(ConfigError, match=message):
        calibrate_model(model, windows[:2], None, CALIBRATION, CalibrationOptions(num_context=CONTEXT))


def test_parts() -> None:
    text = torch.arange(10)
    assert part_of(text, "0.5:1").tolist() == [5, 6, 7, 8, 9]
    assert part_of(text, "0:1").tolist() == text.tolist()
    for bad in ("", "1", "0.5:0.5", "-1:1", "a:b", "0:2", "nan:1"):
        with pytest.raises(ConfigError, match="expected FROM:TO"):
            part_of(text, bad)


def test_a_model_that_overflows_is_named(
    model: KVModel, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = model.log_probabilities
    monkeypatch.setattr(model, "log_probabilities", lambda *args: exact(*args) * float("nan"))
    with pytest.raises(ConfigError, match=r"log probabilities contain NaN in torch\.float32"):
        calibrate_model(model, windows[:2], None, CALIBRATION, CalibrationOptions(num_context=CONTEXT))
