"""What only a real language model shows: attention sinks, and tokens that matter more than others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.measure import measure
from benchmarks.codec.methods import CacheGen, SegmentMethod
from benchmarks.real_model import prose
from sgl_kvfetch.codec import CalibrationOptions, KltQuantiser, LayeredModel, Profile, calibrate_model, map_layers
from sgl_kvfetch.codec.calibrate.text import calibration_windows, cut_windows
from tests.codec.quant.profiles import CALIBRATION

pytestmark = [pytest.mark.slow]

CONTEXT, CONTINUATION = 512, 128


@pytest.fixture(scope="module")
def model(real_model: Path) -> KVModel:
    return KVModel(str(real_model))


@pytest.fixture(scope="module")
def tokens(model: KVModel) -> torch.Tensor:
    return model.tokenise(prose()[:120_000])


@pytest.fixture(scope="module")
def profile(model: KVModel, tokens: torch.Tensor) -> Profile:
    """Of far fewer tokens than one would calibrate on."""
    windows = calibration_windows(model.tokenizer, [tokens[: len(tokens) // 2]], 8, CONTEXT + CONTINUATION)
    layered = LayeredModel(model.path)
    return calibrate_model(
        layered, {"text": windows}, map_layers(layered)[0], CALIBRATION, CalibrationOptions(num_context=CONTEXT)
    )


def test_the_first_token_is_a_sink_and_the_default_within_reach(profile: Profile) -> None:
    assert profile.num_sinks == 1
    assert profile.curve[0].kl < profile.default_target_kl < profile.curve[-1].kl
    assert 0.2 < profile.context_kl < 5


def test_half_of_cachegens_bits_do_better_than_cachegen(model: KVModel, tokens: torch.Tensor, profile: Profile) -> None:
    windows = cut_windows([tokens[len(tokens) // 2 :]], 2, CONTEXT + CONTINUATION + 1, model.start)
    _, (theirs,) = measure(model, windows, CONTEXT, [CacheGen(32)])
    ours = SegmentMethod("klt", KltQuantiser(profile, theirs.kl.mean / 2), "hevc")
    _, (row,) = measure(model, windows, CONTEXT, [ours])
    assert row.kl.mean < theirs.kl.mean
    assert row.bits_per_value.mean < theirs.bits_per_value.mean / 2
