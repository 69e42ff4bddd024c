"""The quantiser ``klt`` and its profile, on a model that is only numbers: correlated channels, known errors."""

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from harness.layer_maps import plain_layers
from sgl_kvfetch.codec.quant import _klt
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import (
    EXACT,
    ZERO,
    IntegerMatrix,
    KltQuantiser,
    exponents_of,
    features,
    forward_of,
    head_norms,
    log_cost,
    require_grid,
    restore_integers,
    scales_of,
)
from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer, Pool
from sgl_kvfetch.codec.quant.profile import MeasuredKind, load_profile, read_outline
from sgl_kvfetch.codec.quant.rope import Rope, unrotate
from sgl_kvfetch.errors import ConfigError
from tests.codec.quant.profiles import PRODUCTS, make_profile, place_of, products, values_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
ONLY = (0, 0)  # the only cell of most profiles here


def there_and_back(quantiser: KltQuantiser, values: CellValues, place: CellPlace) -> CellValues:
    return quantiser.dequantise(quantiser.quantise(values, place), values.k.dtype, place)


@pytest.fixture(params=PRODUCTS)
def each_product(request: pytest.FixtureRequest) -> Iterator[None]:
    with products(request.param):
        yield


@pytest.mark.usefixtures("each_product")
@pytest.mark.parametrize(
    ("step", "cell_heads", "most"), [(0.2, 1, 0.52), (0.2, 2, 0.52), (0.2, 4, 0.52), (0.03, 4, 0.6), (4.0, 4, 0.75)]
)
def test_coefficients_are_off_by_half_a_step(step: float, cell_heads: int, most: float) -> None:
    """Fine steps give wide coefficients two integers, and coarse ones leave out those that are nearly always zero. The
    bounds are above a half, since float32 rounds, and a product in bfloat16 does."""
    profile = make_profile(num_layers=4, cell_heads=cell_heads)
    quantiser = KltQuantiser(profile, step=step)
    values = values_of(profile, 301)
    for key, cell in profile.cells.items():
        place = place_of(profile, key, 301)
        part = values.cell(place.layers, place.heads)
        _, exact, integers = quantised = quantiser.quantise(part, place)
        num_wide = len(quantiser.wide_coefficients(place))
        kept = len(integers) - num_wide
        assert len(integers) == quantiser.num_coefficients(place)
        assert (kept < cell.num_channels, num_wide > 0, exact.numel()) == (step == 4.0, step < 1, 0)
        back = quantiser.dequantise(quantised, torch.float32, place)
        # Errors of values, K not rotated, as errors of coefficients.
        channels = torch.cat([(x - y).double().flatten(1) for x, y in zip(back, part, strict=True)], dim=1)
        off = (channels @ torch.linalg.inv(cell.inverse.double()) / step).abs()
        assert 0.45 < off[:, :kept].max() < most
        assert (off[:, kept:] < 2).all()  # what they vary by


@pytest.mark.usefixtures("each_product")
@pytest.mark.parametrize(("size", "count", "is_exact"), [(20, 1, True), (-20, 3, True), (12, 1, False), (12, 9, False)])
def test_a_token_with_a_coefficient_out_of_bounds_that_is_not_kept_is_exact(
    size: int, count: int, is_exact: bool
) -> None:
    """``size``: in steps; the bound is 16. Coefficients are computed only if sums of them are large, as those of nine
    coefficients of 12 steps are."""
    profile = make_profile()
    quantiser = KltQuantiser(profile, step=4.0)
    place, values = place_of(profile, ONLY, 20), values_of(profile, 20)
    kept = quantiser._rows[ONLY].kept
    more = size * quantiser.step * profile.cells[ONLY].inverse[kept : kept + count].float().sum(0)
    of_k = values.k[7].numel()
    values.k[7] += more[:of_k].view_as(values.k[7])
    values.v[7] += more[of_k:].view_as(values.v[7])
    exponents, _, integers = quantiser.quantise(values, place)
    assert (exponents == EXACT).nonzero().flatten().tolist() == ([7] if is_exact else [])
    assert bool((integers[:, 7] == ZERO).all()) == is_exact


@pytest.mark.parametrize("dtype", [*DTYPES, *FP8])
def test_sinks_are_exact_at_the_start_of_a_sequence_alone(dtype: torch.dtype) -> None:
    profile = make_profile(num_sinks=2)
    quantiser = KltQuantiser(profile, step=1.0)
    values = CellValues(*(x.to(dtype) for x in values_of(profile, 10)))
    for first_token, expected in ((0, [0, 1]), (1, [0]), (2, []), (5000, [])):
        place = place_of(profile, ONLY, 10, first_token)
        exponents, _, _ = quantised = quantiser.quantise(values, place)
        which = (exponents == EXACT).nonzero().flatten()
        assert which.tolist() == expected
        back = quantiser.dequantise(quantised, dtype, place)
        assert all(torch.equal(b[which].float(), x[which].float()) for b, x in zip(back, values, strict=True))


NEOX = Rope(inv_freq=tuple(0.7**i for i in range(8)))
# Of a model of five layers: the coded ones have two rotations, with a scaling in one of them, and none.
MIXED = LayerMap(
    layers=(
        ModelLayer(rotation=1, window=16),
        ModelLayer(pool=Pool.WINDOW, window=8),
        ModelLayer(),
        ModelLayer(pool=Pool.STATE),
        ModelLayer(rotation=0),
    ),
    rotations=(NEOX, Rope(inv_freq=tuple(0.3**i for i in range(8)), attention_scaling=1.3)),
)


Times = Callable[[torch.Tensor], torch.Tensor]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k_weight": torch.zeros_like}, "are not those of 0.0.inverse"),
        ({"v_weight": torch.zeros_like}, "are not those of 0.0.inverse"),
        ({"inverse": lambda x: x * 100, "k_weight": lambda x: x / 100}, "are not those of 0.0.inverse"),
        ({"k_weight": torch.neg}, "are not those of 0.0.inverse"),
        # One weight of 64, which the first of 12 blocks has.
        ({"k_weight": lambda x: x * (1 - torch.eye(64)[0].outer(torch.eye(64)[0]))}, "are not those of 0.0.inverse"),
        ({"spread": torch.neg}, "0.0.spread has values below 0"),
        ({"spread": lambda x: x / 0}, "0.0.spread has values that are not finite"),
        ({"reach": torch.neg}, "0.0.reach has values below 0"),
        ({"inverse": lambda x: torch.full_like(x, 1e31)}, "0.0.inverse and 0.0.mean could restore values up to"),
        ({"mean": lambda x: torch.full_like(x, 1e31)}, "0.0.inverse and 0.0.mean could restore values up to"),
    ],
)
def test_a_profile_whose_parts_contradict_each_other_or_restore_infinity_is_refused(
    tmp_path: Path, changes: dict[str, Times], message: str
) -> None:
    """Audits judge errors by its weights: with weights of nothing, every value would be sound. Kernels restore what a
    store's writers choose, and nobody looks at it."""
    profile = make_profile()
    cell = profile.cells[ONLY]
    lying = replace(cell, **{name: change(getattr(cell, name)) for name, change in changes.items()})
    replace(profile, cells={ONLY: lying}).save(tmp_path / "p")
    with pytest.raises(ConfigError, match=message):
        load_profile(tmp_path / "p")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_restored_is_finite_whatever_integers_are_stored(tmp_path: Path, dtype: torch.dtype) -> None:
    """With the largest cells whose weights are float32."""
    profile = make_profile(rope=Rope(inv_freq=(0.5, 0.01), attention_scaling=1e6))
    cell = profile.cells[ONLY]
    weights = {name: getattr(cell, name) * 2.0**-120 for name in ("k_weight", "v_weight")}
    large = replace(cell, inverse=cell.inverse * 2.0**60, **weights)
    replace(profile, cells={ONLY: large}).save(tmp_path / "p")
    quantiser = KltQuantiser(load_profile(tmp_path / "p"), step=4.0)
    place = place_of(quantiser.profile, ONLY, 2)
    count = quantiser.num_coefficients(place)
    assert count is not None
    for fill in (0, 255):
        integers = torch.full((count, 2), fill, dtype=torch.uint8)
        exponents = torch.full((2,), 136, dtype=torch.uint8)
        back = quantiser.dequantise((exponents, torch.empty(0, dtype=torch.uint8), integers), dtype, place)
        assert all(bool(torch.isfinite(x).all()) for x in back)


def test_pipeline_stages_that_cut_cells_are_refused() -> None:
    profile = make_profile(num_layers=8, cell_heads=2)
    require_grid(profile, 3, 5, 0, 4)
    with pytest.raises(ConfigError, match=r"layers 0 to 4 of 8 split the profile's groups of 3"):
        require_grid(profile, 0, 4, 0, 4)


def test_a_target_takes_the_step_that_was_measured_to_cost_it() -> None:
    profile = make_profile()
    for point in profile.curve:
        assert profile.step_for(point.kl) == pytest.approx(point.step, rel=1e-3)
    low, high = profile.curve[0], profile.curve[1]
    between = profile.step_for((low.kl * high.kl) ** 0.5)
    assert between == pytest.approx((low.step * high.step) ** 0.5, rel=1e-3)
    assert between == float(f"{between:.4g}")
    with pytest.raises(ConfigError, match=r"target_kl = 5 is outside this profile's range, 1e-05 to 0.01"):
        profile.step_for(5)


def test_the_default_target_is_a_share_of_what_the_context_is_worth() -> None:
    """Or the nearest that was measured, so that there always is one."""
    for context_kl, expected in ((1.0, 1e-3), (0.05, 5e-5), (100.0, 1e-2), (1e-9, 1e-5)):
        profile = replace(make_profile(), context_kl=context_kl)
        assert profile.default_target_kl == pytest.approx(expected)
        assert KltQuantiser(profile).step == profile.step_for(profile.default_target_kl)
    # Where the mean costs the share, the worst kind costs more.
    others = (1e-6, 2e-5, 2e-3)
    kinds = tuple(
        MeasuredKind(name, 4, 1, True, 1.0, kls) for name, kls in (("worst", (1e-5, 1e-4, 1e-2)), ("o", others))
    )
    for context_kl, expected in ((6.0, 1e-2), (0.6, 1e-3)):  # the second one halfway between the last two steps
        profile = replace(make_profile(), kinds=kinds, context_kl=context_kl)
        assert profile.default_target_kl == pytest.approx(expected)


def test_a_profile_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    profile = make_profile(num_layers=5, cell_heads=2, v_head_dim=8, rope=Rope(inv_freq=(1.0, 0.1)), num_sinks=1)
    profile.save(tmp_path / "p")
    again = load_profile(tmp_path / "p")
    assert again.digest == profile.digest
    for each in (again, read_outline(tmp_path / "p")):
        assert replace(each, cells={}) == replace(profile, cells={})


def _edit_metadata(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the JSON that stands at the beginning of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    ours = json.loads(header["__metadata__"]["kvfetch"])
    change(ours)
    header["__metadata__"]["kvfetch"] = json.dumps(ours)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def _rotating(m: dict[str, Any], *ropes: dict[str, Any], by: int | None = 0) -> None:
    """Give the map these rotations, and all layers the first of them, or another."""
    m["layers"]["rotations"] = ropes
    for layer in m["layers"]["layers"]:
        layer["rotation"] = by


def _nested(path: Path, text: str, depth: int) -> None:
    path.write_bytes(save({"x": torch.zeros(1)}, {"kvfetch": text % ("[" * depth + "]" * depth)}))


METADATA: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda m: m.update(version=2), "has version 2, expected 4; calibrate again"),
    (lambda m: m["calibration"].update(context_tokens=0), "malformed.*context_tokens"),
    (lambda m: m["curve"].reverse(), "rise in step and in kl"),
    # Interpolating would give a step of NaN, of 4.6e302, and an OverflowError.
    (lambda m: m["curve"][0].update(kl=5e-324), "steps from 0.0001 to 1000"),
    # What a profile says of itself decides how coarse its default step is, and how much is stored as it is.
    (lambda m: m.update(context_kl=1e6), "context_kl from 1e-09 to 100"),
    (lambda m: m["curve"][0].update(bits_per_value=-1.0), "needs bits_per_value from 0"),
    (
        lambda m: _rotating(m, {"inv_freq": [1.0], "attention_scaling": 1e308}),
        "expected a number from 1e-06 to 1e\\+06",
    ),
    (lambda m: m["kinds"].append(m["kinds"][0]), "called .'chats', 'tables', 'chats'., expected dif"),
    (lambda m: m["kinds"][0].update(name="a\nb"), "names that can be printed"),
    (lambda m: m["kinds"][1]["kls"].pop(), "'tables' has 2 of kls, expected one for each of 3 steps"),
    (lambda m: m["kinds"][1].update(context_kl=-1.0), "'tables' needs numbers from 0 to 100"),
    # Whoever says that a step costs less than its worst kind makes servers take a coarser one.
    (lambda m: m["curve"][1].update(kl=5e-5), "the kl 5e-05 at the step 1, but its worst kind 0.0001"),
    (lambda m: m["kinds"][0].update(counts=False), "but its worst kind None"),
    (lambda m: m.update(cell_heads=3), "cell_heads is 3, expected a divisor of num_heads = 4"),
    (lambda m: m["layers"].update(layers=2 * m["layers"]["layers"]), "has 7 tensors, expected 7 for each of 2 cells"),
    (lambda m: m["layers"].update(layers=[{"pool": "window"}] * 3), "its map has no layer that is coded"),
    (lambda m: _rotating(m, {"inv_freq": []}), "inv_freq has 0 entries"),
    (lambda m: _rotating(m), r"its layers have the rotations \[0\] of 0"),
    (lambda m: _rotating(m, *[{"inv_freq": [1.0]}] * 17), "17 rotations, expected 16 at most"),
    (lambda m: _rotating(m, {"inv_freq": [1.0]}, by=None), r"the rotations \[\] of 1"),
    (lambda m: _rotating(m, {"inv_freq": [1.0] * 9}), "a rotation turns 18 channels, but heads have 16"),
    (lambda m: m.update(k_head_dim=8), r"0\.0\.inverse is BF16 \(384, 384\), expected BF16 \(288"),
    (lambda m: m["calibration"].update(notes=["x"] * 300_000), "metadata of 15.* at most 1048576"),
]
FILES: list[tuple[Callable[[Path], object], str]] = [
    (lambda p: p.write_bytes(p.read_bytes()[:-9]), "cannot be read"),
    (lambda p: p.write_bytes(p.read_bytes().replace(b"0.0.inv", b"0.1.inv")), r"0\.0\.inverse is missing"),
    (lambda p: p.write_bytes(struct.pack("<Q", 1 << 24) + bytes(1 << 24)), "header would have 16777216 bytes"),
    (lambda p: _nested(p, '{"version":4,"later":%s}', 1000), "malformed"),
    (lambda p: _nested(p, "%s", 100_000), "malformed"),
]


def test_a_damaged_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "p"
    damages: list[tuple[Callable[[Path], object], str]] = [
        (partial(_edit_metadata, change=change), message) for change, message in METADATA
    ]
    for damage, message in (*damages, *FILES):
        make_profile().save(path)
        damage(path)
        with pytest.raises(ConfigError, match=message) as error:
            load_profile(path)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < 1000


def test_a_small_profile_of_many_cells_takes_little_memory(tmp_path: Path) -> None:
    """Whoever may write into a store chooses how many layers and heads it says to have."""
    path = tmp_path / "p"
    make_profile().save(path)
    many: dict[str, Any] = {"layers": [{}] * (1 << 10)}
    _edit_metadata(path, lambda m: m.update(layers=many, num_heads=1 << 12, cell_layers=1, cell_heads=1))
    tracemalloc.start()
    try:
        with pytest.raises(
            ConfigError, match="7 tensors, expected 7 for each of 4194304 cells of 1024 layers and 4096"
        ):
            load_profile(path)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 << 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_native_half_rounds_as_torch_does(dtype: torch.dtype) -> None:
    """Every sign and exponent of float16's and more, with ties, subnormals and zeros."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-30, 15).repeat_interleave(500).float()
    values = 2**exponents * (1 + torch.randint(0, 1 << 12, exponents.shape, generator=generator) / (1 << 12))
    values = torch.cat((values, -values, torch.zeros(1), torch.tensor([65503.0])))
    k, v = torch.empty(len(values), dtype=dtype), torch.empty(len(values), dtype=dtype)
    product = torch.stack((values, -values), dim=1)
    tensors = product, torch.ones(len(values)), torch.zeros(2), product, k, v, torch.zeros(1).long()
    _klt.restore(len(values), 1, 1, 1, 1, 0, False, 0, DTYPES.index(dtype), *(x.data_ptr() for x in tensors))
    assert torch.equal(k, values.to(dtype))
    assert torch.equal(v, (-values).to(dtype))


@pytest.mark.parametrize("num_tokens", [1, 64, 131])
@pytest.mark.parametrize(
    ("num_rows", "spread"), [(241, (1.0, -2.0)), (180, (1.0, 1.0)), (2, (-1.0, -1.0)), (0, (0.0, 0.0))]
)
def test_products_hold_whatever_the_integers(num_rows: int, spread: tuple[float, float], num_tokens: int) -> None:
    """With and without vectors: the largest sums that a channel can have, and any others. Rows may all be rare, or all
    frequent; a cell whose channels carry no information at its step has none."""
    generator = torch.Generator().manual_seed(0)
    inverse = torch.randn((num_rows, 480), generator=generator, dtype=torch.float64)
    shifts = 8 * (torch.arange(num_rows) >= 180)  # the largest number is a sum if there are such rows, or else an entry
    spreads = torch.logspace(*spread, min(num_rows, 180))
    matrix = IntegerMatrix.of(inverse, shifts, spreads, most_error=float("inf"))
    assert matrix is not None
    is_rare = torch.zeros(num_rows, dtype=torch.bool)
    is_rare[matrix.rare_rows.long()] = True
    assert (bool(is_rare.any()), bool(is_rare.all())) == (spread[1] < 0, num_rows <= 2)
    integers = torch.randint(0, 256, (num_rows, num_tokens + 3), generator=generator, dtype=torch.uint8)
    integers[:, 0] = torch.where(inverse[:, 0] > 0, 0, 255)
    integers[:, num_tokens // 2] = 0
    integers = integers[:, :num_tokens]  # rows apart
    found = []
    for is_portable in (False, True):
        k, v = (torch.full((num_tokens, 12, dim), torch.nan) for dim in (16, 24))
        factors = torch.ones(num_tokens), torch.zeros(480), torch.empty(0)
        turns, heads = torch.zeros(3).long(), (16, 24, 0, False)
        restore_integers(matrix, integers, 12, heads, factors, (k, v), turns, is_portable=is_portable)
        found.append(torch.cat((k.flatten(1), v.flatten(1)), dim=1))
    assert torch.equal(*found)
    n = ((integers.double() - ZERO) * 2.0 ** shifts[:, None]).T
    frequent, rare = matrix.units[:, :480].double()
    units = torch.where(is_rare[:, None], rare, frequent)  # to which entries are rounded
    most = n.abs() @ (0.501 * units + 2.0**-22 * inverse.abs())
    assert ((found[0] - n @ inverse).abs() <= most).all()


def _as_specified(quantiser: KltQuantiser, values: CellValues, place: CellPlace) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponents, and the coefficients in steps, in float64 and without the native half."""
    profile = quantiser.profile
    cell = profile.cells[ONLY]
    k, v = (x.float().clone() for x in values)
    for index, number in enumerate(profile.layers.coded):
        rope = profile.layers.rope_of(number)
        if rope is not None:
            k[:, index] = unrotate(k[:, index], rope.table(place.tokens.start, len(k)), rope)
    channels = torch.cat((k.flatten(1), v.flatten(1)), dim=1)
    forward = forward_of(cell.inverse, [*cell.k_weight, *cell.v_weight])
    coefficients = (channels - cell.mean).double() @ forward.double()
    exponents = exponents_of(
        log_cost(features(coefficients.float(), cell.spread, head_norms(values)), cell.sensitivity)
    )
    return exponents, coefficients / (scales_of(exponents)[:, None] * quantiser.step)


@pytest.mark.usefixtures("each_product")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [0.05, 1.0])
@pytest.mark.parametrize(
    "layers",
    [
        plain_layers(3),
        plain_layers(3, Rope(inv_freq=(0.5, 0.01), interleaved=True, attention_scaling=1.3)),
        plain_layers(3, NEOX),
        MIXED,
    ],
    ids=["plain", "interleaved", "NeoX", "mixed"],
)
def test_the_native_half_quantises_as_specified(layers: LayerMap, step: float, dtype: torch.dtype) -> None:
    profile = make_profile(layers=layers, v_head_dim=24, num_sinks=1)
    cell = profile.cells[ONLY]
    sensitivity = torch.randn(len(cell.sensitivity), generator=torch.Generator().manual_seed(1)) / 30
    profile = replace(profile, cells={ONLY: replace(cell, sensitivity=sensitivity)})
    quantiser = KltQuantiser(profile, step=step)
    values = CellValues(*(x.to(dtype) for x in values_of(profile, 203, first_token=7)))
    apart = CellValues(*(x.transpose(0, 1).contiguous().transpose(0, 1) for x in values))  # layer by layer
    place = place_of(profile, ONLY, 203, first_token=7)
    exponents, _, integers = quantised = quantiser.quantise(values, place)
    assert all(torch.equal(a, b) for a, b in zip(quantised, quantiser.quantise(apart, place), strict=True))

    rows = quantiser._rows[ONLY]
    expected, steps = _as_specified(quantiser, values, place)
    is_large = (steps[:, : rows.kept].round().abs() > rows.limits).any(1) | (steps[:, rows.kept :].abs() > 16).any(1)
    is_exact = exponents == EXACT
    assert (is_exact != is_large).float().mean() < 0.02
    assert is_large.sum() < 40
    apart_by = (exponents.int() - expected.int())[~is_exact]
    assert apart_by.abs().max() <= 1  # costs between two exponents
    assert apart_by.abs().float().mean() < 0.1
    alike = exponents == expected
    n = integers.T.double() - ZERO
    n[:, rows.wide] += n[:, rows.kept :] * 2.0**rows.bits
    off = (n[:, : rows.kept] - steps[:, : rows.kept])[alike]
    assert off.abs().max() < (0.52 if quantiser.forward(place).matrix.dtype == torch.float32 else 2)
    assert (off.square().mean() * 12).sqrt() < 1.05  # of the noise of rounding alone


def _instruction_sets() -> list[tuple[str, str]]:
    """Return the limits that torch's and oneDNN's instruction sets can have here and that differ."""
    has = torch.cpu.get_capabilities()
    sets = [
        ("default", "AVX2", "avx2"),
        ("avx2", "AVX512_CORE", "avx512_bw"),
        ("avx512", "AVX512_CORE_BF16", "avx512_bf16"),
    ]
    return [(of_torch, of_onednn) for of_torch, of_onednn, name in sets if has.get(name)]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize(("of_torch", "of_onednn"), _instruction_sets())
def test_each_instruction_set_rounds_within_the_bounds(of_torch: str, of_onednn: str) -> None:
    """The tests themselves run with the best that the machine has."""
    limits = {"ATEN_CPU_CAPABILITY": of_torch, "ONEDNN_MAX_CPU_ISA": of_onednn}
    names = "CPU and (off_by_half or half_quantises) or golden_segments_read and klt"
    files = __file__, str(Path(__file__).parents[1] / "container" / "test_golden.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files, "-k", names]
    done = subprocess.run(command, env=os.environ | limits, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:]


def test_layers_of_a_cell_that_differ_are_no_fault_of_the_first_layer() -> None:
    """Behind restored values, they differ. All layers of a cell are coded together."""
    profile = make_profile()
    quantiser, place = KltQuantiser(profile), place_of(profile, ONLY, 64)
    values = values_of(profile, 64)
    restored = there_and_back(quantiser, values, place)
    computed = CellValues(*(x.clone() for x in values))
    for x in computed:
        x[5, 1:] *= 5
    assert float(quantiser.repeat_ratios(computed, restored, place)[:, 0, 5].max()) < 2
    for x in restored:
        x[5] = 0  # it is not restored
    assert float(quantiser.repeat_ratios(computed, restored, place)[:, 0, 5].min()) > 24
