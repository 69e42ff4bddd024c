"""The quantiser ``klt`` and its profile, on a model that is only numbers: correlated channels, known errors."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sgl_kvfetch.errors import ConfigError, QuantiseError
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.layout.tiling import Tiling, layout_of
from sgl_kvfetch.quant import quantiser_from_identity
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import Profile, load_profile
from sgl_kvfetch.quant.rope import Rope, rotate
from sgl_kvfetch.types import TENSORS
from tests.quant.profiles import make_profile, values_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def error_in_steps(quantiser: KltQuantiser, tensor: str, error: torch.Tensor) -> torch.Tensor:
    """An error of unrotated values as errors of coefficients, in steps."""
    inverse = quantiser.inverse[tensor].double()  # type: ignore[index]
    layers, blocks, size, _ = inverse.shape
    flat = error.double().reshape(-1, layers, blocks, size)
    return torch.einsum("tlbi,lbij->tlbj", flat, torch.linalg.inv(inverse)) / quantiser.step


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("block_heads", [1, 2, 4])
def test_no_coefficient_is_off_by_more_than_half_a_step(tensor: str, block_heads: int) -> None:
    profile = replace(make_profile(block_heads=block_heads), rope=None)
    quantiser = KltQuantiser(profile, step=1.5)
    values = values_of(profile, tensor, 301)
    quantised = quantiser.quantise(values, tensor, 0)
    assert quantised.integers.shape == (1, *values.shape)
    assert (quantised.scales == 1).all()
    restored = quantiser.dequantise(quantised, torch.float32, tensor, 0)
    off = error_in_steps(quantiser, tensor, restored - values).abs()
    assert 0.45 < off.max() < 0.502


def test_rows_of_the_same_coefficient_vary_less_and_less() -> None:
    profile = make_profile()
    integers = KltQuantiser(profile, step=1.0).quantise(values_of(profile, "v", 4000), "v", 0).integers[0]
    spread = integers.float().std(0).flatten(1)  # (layers, coefficients): one block a layer
    assert (spread[:, :-8].mean(1) > 0).all()
    assert (spread[:, 8:] <= spread[:, :-8] * 1.1 + 0.05).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_k_is_restored_where_it_stood(dtype: torch.dtype) -> None:
    """Far into the sequence, and in a part of it: the rotation is that of the position."""
    profile = make_profile(rope=Rope(inv_freq=tuple(10000.0 ** (-i / 8) for i in range(8))))
    assert profile.rope is not None
    quantiser = KltQuantiser(profile, step=0.5)
    plain = values_of(profile, "k", 64).float()
    k = rotate(plain, profile.rope.table(5000, 64), profile.rope).to(dtype)
    quantised = quantiser.quantise(k, "k", 0, 5000)
    restored = quantiser.dequantise(quantised, dtype, "k", 0, 5000)
    assert restored.dtype == dtype
    worst = (quantiser.inverse["k"].float().abs().sum(2).max() * quantiser.step / 2).item()
    assert (restored.float() - k.float()).abs().max() < worst
    # Positions matter: somewhere else it is another key.
    assert (quantiser.dequantise(quantised, dtype, "k", 0, 0).float() - k.float()).abs().max() > 2 * worst
    # And the coefficients are those that the same keys have at the start.
    at_start = rotate(plain, profile.rope.table(0, 64), profile.rope)
    same = quantiser.quantise(at_start, "k", 0, 0).integers.int() - quantised.integers.int()
    assert same.abs().max() <= (1 if dtype != torch.bfloat16 else 3)


def test_layers_and_heads_are_the_models_own() -> None:
    profile = make_profile(block_heads=2)
    values = values_of(profile, "v", 40)
    whole = KltQuantiser(profile, step=1.0).quantise(values, "v", 0)
    part = KltQuantiser(profile, step=1.0).quantise(values[:, 1:], "v", 1)
    assert torch.equal(part.integers, whole.integers[:, :, 1:])
    rank = KltQuantiser(profile, step=1.0, first_head=2, num_heads=2)
    sliced = rank.quantise(values[:, :, 2:], "v", 0)
    assert torch.equal(sliced.integers, whole.integers[:, :, :, 2:])
    restored = rank.dequantise(sliced, torch.float32, "v", 0)
    assert torch.equal(restored, KltQuantiser(profile, step=1.0).dequantise(whole, torch.float32, "v", 0)[:, :, 2:])


def test_an_outlier_takes_a_coarser_scale_of_its_own() -> None:
    profile = make_profile()
    quantiser = KltQuantiser(profile, step=1.0)
    values = values_of(profile, "v", 20)
    values[7, 1] *= 300
    quantised = quantiser.quantise(values, "v", 0)
    assert quantised.scales is not None
    assert quantised.scales[7, 1, 0] > 1
    others = torch.ones(20, profile.num_layers, 1)
    others[7, 1] = quantised.scales[7, 1].float()
    assert torch.equal(quantised.scales.float(), others)
    restored = quantiser.dequantise(quantised, torch.float32, "v", 0)
    off = error_in_steps(quantiser, "v", restored - values).flatten(2).abs().amax(2) / quantised.scales[..., 0].float()
    assert off.max() < 0.502


def test_what_cannot_be_quantised_is_refused() -> None:
    profile = make_profile()
    quantiser = KltQuantiser(profile, step=1.0)
    values = values_of(profile, "v", 5)
    with pytest.raises(QuantiseError, match="float8_e4m3fn"):
        quantiser.quantise(values.to(torch.float8_e4m3fn), "v", 0)
    values[3, 1, 0, 2] = float("nan")
    with pytest.raises(QuantiseError, match="not finite"):
        quantiser.quantise(values, "v", 0)


def test_the_largest_values_stay_finite() -> None:
    profile = make_profile()
    quantiser = KltQuantiser(profile, step=1.0)
    values = torch.full((2, profile.num_layers, profile.num_heads, 16), torch.finfo(torch.float16).max)
    restored = quantiser.dequantise(quantiser.quantise(values.half(), "v", 0), torch.float16, "v", 0)
    assert torch.isfinite(restored).all()


def test_the_identity_names_profile_and_step_and_is_known_without_the_profile() -> None:
    profile = make_profile()
    quantiser = KltQuantiser(profile, 1e-4)
    assert profile.digest in quantiser.identity
    other = replace(profile, mean={**profile.mean, "v": profile.mean["v"] + 1})
    steps = [KltQuantiser(profile, 2e-4), KltQuantiser(other, 1e-4)]
    assert len({q.identity for q in (quantiser, *steps)}) == 3
    known = quantiser_from_identity(quantiser.identity)
    assert known.identity == quantiser.identity
    assert (known.planes(torch.bfloat16), known.scales_per_layer(4)) == (1, 1)
    with pytest.raises(QuantiseError, match="needs its profile"):
        known.quantise(values_of(profile, "v", 5), "v", 0)


def test_a_target_takes_the_step_that_was_measured_to_cost_it() -> None:
    profile = make_profile()
    for point in profile.curve:
        assert profile.step_for(point.kl) == pytest.approx(point.step, rel=1e-3)
    low, high = profile.curve[0], profile.curve[1]
    between = profile.step_for((low.kl * high.kl) ** 0.5)
    assert between == pytest.approx((low.step * high.step) ** 0.5, rel=1e-3)
    assert between == float(f"{between:.4g}")
    with pytest.raises(ConfigError, match=r"target_kl = 5: the profile was measured from 1e-05 to 0.01"):
        profile.step_for(5)


def test_heads_that_cut_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"heads 1 to 2 of 4 are no whole blocks of 2.*--tp-size"):
        KltQuantiser(make_profile(block_heads=2), step=1.0, first_head=1, num_heads=1)


def test_a_stored_tiling_is_used_by_those_whose_heads_it_holds() -> None:
    tiling = Tiling(head_rows=1, head_cols=4, dim_rows=1, dim_cols=16)
    profile = make_profile().with_tiling("k", tiling)

    def layout(num_heads: int, tensor: str) -> FrameLayout:
        return KltQuantiser(profile, step=1.0).layout(tensor, num_heads, 16, 512, "240p")  # type: ignore[arg-type]

    assert layout(4, "k") == layout_of(tiling, 512, "240p")
    assert layout(4, "v") != layout_of(tiling, 512, "240p")
    assert layout(2, "k").head_rows * layout(2, "k").head_cols == 2


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    profile = make_profile(rope=Rope(inv_freq=(1.0, 0.1))).with_tiling(
        "v", Tiling(head_rows=2, head_cols=2, dim_rows=4, dim_cols=4)
    )
    profile.save(tmp_path / "p")
    again = load_profile(tmp_path / "p")
    assert again.digest == profile.digest
    assert (again.rope, again.curve, again.calibration, again.tiling) == (
        profile.rope,
        profile.curve,
        profile.calibration,
        profile.tiling,
    )
    for tensor in TENSORS:
        assert all(torch.equal(x, profile.tensors(tensor)[name]) for name, x in again.tensors(tensor).items())
    assert [f.name for f in tmp_path.iterdir()] == ["p"]


def test_a_tiling_does_not_change_what_profiles_restore() -> None:
    tiling = Tiling(head_rows=2, head_cols=2, dim_rows=4, dim_cols=4)
    assert make_profile().with_tiling("k", tiling).digest == make_profile().digest


def _edit_metadata(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Rewrites the JSON that stands at the beginning of a safetensors file."""

    def edit(path: Path) -> None:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + length])
        ours = json.loads(header["__metadata__"]["kvfetch"])
        change(ours)
        header["__metadata__"]["kvfetch"] = json.dumps(ours)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.unlink(), "cannot be read"),
        (lambda p: p.write_bytes(b"no tensors"), "cannot be read"),
        (lambda p: p.write_bytes(p.read_bytes()[:-9]), "cannot be read"),
        (_edit_metadata(lambda m: m.update(version=2)), "has version 2, this reader knows 1"),
        (_edit_metadata(lambda m: m.pop("curve")), "malformed.*curve"),
        (_edit_metadata(lambda m: m["curve"].reverse()), "rise in step and in kl"),
        (_edit_metadata(lambda m: m.update(curve=[])), "two or more points"),
        (_edit_metadata(lambda m: m["curve"][0].update(kl=0.0)), "above 0"),
        (
            _edit_metadata(lambda m: m.update(k_tiling={"head_rows": 2, "head_cols": 2, "dim_rows": 3, "dim_cols": 5})),
            "k_tiling is heads 2x2, dims 3x5, sliced, too small for heads of 16 values",
        ),
        (_edit_metadata(lambda m: m.update(rope={"inv_freq": [1.0] * 9})), "rope turns 18 channels, heads have 16"),
    ],
)
def test_a_damaged_profile_is_named(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "p"
    make_profile().save(path)
    damage(path)
    with pytest.raises(ConfigError, match=message) as error:
        load_profile(path)
    assert str(path) in str(error.value)


def _without(name: str) -> Callable[[Profile], Profile]:
    def change(profile: Profile) -> Profile:
        tensors = {**getattr(profile, name)}
        tensors["k"] = tensors["k"][:1]
        return replace(profile, **{name: tensors})

    return change


@pytest.mark.parametrize("name", ["inverse", "spread", "mean"])
def test_tensors_that_do_not_fit_together_are_named(tmp_path: Path, name: str) -> None:
    _without(name)(make_profile()).save(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"malformed: k\.(inverse|spread) has shape"):
        load_profile(tmp_path / "p")


def test_a_transform_that_cannot_be_undone_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    profile = make_profile()
    profile.inverse["v"][1, 0, 3] = 0
    profile.save(tmp_path / "p")
    with pytest.raises(ConfigError, match=r"v\.inverse is singular in layer 1"):
        load_profile(tmp_path / "p")


def test_a_profile_whose_transform_overflows_is_refused() -> None:
    profile = make_profile()
    profile.spread["k"][0, 0, 0] = 3e38
    with pytest.raises(ConfigError, match=r"k\.spread is too large"):
        KltQuantiser(profile, step=1e-3)
