"""The kernels that quantise `klt`, beside ``KltQuantiser.quantise``."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest
import torch

from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.layout.regions import region_layout
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser
from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer, plain_layers
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.triton_kernels.quantise_klt import NOT_FINITE, quantise_klt
from tests.codec.quant.profiles import make_profile, place_of, values_of
from tests.triton_kernels.cases import DEVICE, FLOATS, Shape, make_buffers, scattered_slots

FIRST_TOKEN = 1234
PLAIN = Rope(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.25)
EVERY = Rope(inv_freq=tuple(10.0**-i for i in range(8)), interleaved=True)

# Layers with two rotations, and without one; a cell has three of them, the other one the last.
MIXED = LayerMap(
    layers=(ModelLayer(rotation=1), ModelLayer(), ModelLayer(rotation=0), ModelLayer(rotation=1)),
    rotations=(PLAIN, Rope(inv_freq=(0.7, 0.3, 0.2))),
)


@cache
def profile_of(layers: LayerMap) -> Profile:
    """Two cells, of three layers and of one. Tokens' scales differ, and tokens 0 and 1 are sinks."""
    profile = make_profile(num_layers=4, num_heads=2, v_head_dim=24, cell_heads=2, layers=layers, num_sinks=2)
    generator = torch.Generator().manual_seed(0)
    cells = {
        key: dataclasses.replace(cell, sensitivity=0.1 * torch.randn(cell.sensitivity.shape, generator=generator))
        for key, cell in profile.cells.items()
    }
    return dataclasses.replace(profile, cells=cells)


def quantised_there(quantiser: KltQuantiser, values: CellValues, place: CellPlace) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exponents and integers of the kernels, for values in scattered slots of a larger pool."""
    num_tokens, of_layers = len(place.tokens), quantiser.profile.rotations
    slots, heads = scattered_slots(num_tokens), values.k.shape[2]
    sides = []
    for x in values:
        buffers = make_buffers(Shape(num_tokens, x.shape[1], heads + 1, x.shape[3]), x.dtype)
        for index, buffer in enumerate(buffers):
            buffer[slots, 1:] = x[:, index].to(DEVICE)
        sides.append([buffer[:, 1:] for buffer in buffers])
    rotations = None if of_layers is None else of_layers.inverse_table(place.tokens.start, num_tokens, DEVICE)
    sinks = max(0, quantiser.profile.num_sinks - place.tokens.start)
    forward = quantiser.forward(place).to(DEVICE)
    exponents, integers = quantise_klt(forward, *sides, slots, rotations, sinks)
    found = integers.cpu()[: forward.num_rows]
    frames = region_layout(forward.num_rows, num_tokens, FLAT).to_frames(found)
    assert torch.equal(integers.cpu().view(-1, 3, 1, num_tokens), frames)  # as codecs take them
    return exponents.cpu(), found


def coefficients_of(quantiser: KltQuantiser, integers: torch.Tensor, place: CellPlace) -> torch.Tensor:
    """Return coefficients of one or two integers, in steps."""
    forward = quantiser.forward(place)
    n = integers.long() - 128
    found, wide = n[: forward.kept].clone(), forward.bits.nonzero().flatten()
    found[wide] += n[forward.high[wide].long()] << forward.bits[wide, None].long()
    return found


def assert_as_the_quantiser(quantiser: KltQuantiser, values: CellValues, place: CellPlace) -> torch.Tensor:
    """But for roundings that the order of sums tips: few, and by one. Return the exponents."""
    wanted, _, integers = quantiser.quantise(values, place)
    exponents, found = quantised_there(quantiser, values, place)
    same = exponents == wanted
    assert int((~same).sum()) <= len(same) // 50
    assert int((exponents.int() - wanted.int()).abs().max()) <= 1
    steps, expected = (coefficients_of(quantiser, x, place)[:, same] for x in (found, integers))
    assert int((steps - expected).abs().max()) <= 1
    assert int((steps != expected).sum()) <= max(1, steps.numel() // 500)
    return exponents


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "layers",
    [plain_layers(4), plain_layers(4, PLAIN), plain_layers(4, EVERY), MIXED],
    ids=["plain", "NeoX", "GPT-J", "mixed"],
)
def test_the_quantisers_integers(layers: LayerMap, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)
    quantiser = KltQuantiser(profile_of(layers), step=0.03)
    assert quantiser.coefficient_shares[1] > 0.3
    whole = CellValues(*(x.to(dtype) for x in values_of(quantiser.profile, 33, FIRST_TOKEN)))
    for key in quantiser.profile.cells:
        place = place_of(quantiser.profile, key, 33, FIRST_TOKEN)
        exponents = assert_as_the_quantiser(quantiser, whole.cell(place.layers, place.heads), place)
        assert len(exponents.unique()) > 2


@pytest.mark.parametrize("num_tokens", [1, 15, 17, 70])
def test_products_in_bfloat16_at_any_number_of_tokens(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", True)
    quantiser = KltQuantiser(profile_of(plain_layers(4, PLAIN)), step=1.0)
    place = place_of(quantiser.profile, (1, 0), num_tokens)
    assert quantiser.forward(place).matrix.dtype == torch.bfloat16
    values = values_of(quantiser.profile, num_tokens).cell(place.layers, place.heads)
    assert_as_the_quantiser(quantiser, CellValues(*(x.bfloat16() for x in values)), place)


def test_exact_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, and tokens with a coefficient that integers cannot hold, kept or not; and values that are not finite."""
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)
    quantiser = KltQuantiser(profile_of(plain_layers(4)), step=2.0)
    assert 0.2 < quantiser.coefficient_shares[0] < 0.9
    place = place_of(quantiser.profile, (0, 0), 40)
    values = values_of(quantiser.profile, 40).cell(place.layers, place.heads)
    inverse = quantiser.profile.cells[0, 0].inverse.float()
    for token, row, size in ((7, 0, 1e6), (20, len(inverse) - 1, 1000.0)):
        k, v = quantiser._split((size * inverse[row])[None], place)
        values.k[token], values.v[token] = k[0], v[0]
    exponents = assert_as_the_quantiser(quantiser, values, place)
    assert {0, 1, 7, 20} <= set((exponents == EXACT).nonzero().flatten().tolist()) < set(range(40))

    values.k[3, 0, 1, 4], values.v[30, 2, 0, 23] = torch.inf, torch.nan
    exponents, integers = quantised_there(quantiser, values, place)
    assert (exponents == NOT_FINITE).nonzero().flatten().tolist() == [3, 30]
    assert bool((integers[:, [0, 3, 7, 20, 30]] == 128).all())


def test_tensors_that_do_not_fit_are_refused() -> None:
    quantiser = KltQuantiser(profile_of(plain_layers(4)), step=2.0)
    forward = quantiser.forward(place_of(quantiser.profile, (0, 0), 5)).to(DEVICE)
    k, v = (make_buffers(Shape(5, 3, 2, dim), torch.float32) for dim in (16, 24))
    slots = scattered_slots(5)
    with pytest.raises(ValueError, match="240 channels, expected 288"):
        quantise_klt(forward, k, [*v, v[0]], slots, None, 0)
    with pytest.raises(ValueError, match="rotation"):
        quantise_klt(forward, k, v, slots, torch.zeros((1, 4, 6), device=DEVICE), 0)
    with pytest.raises(ValueError, match="1 rotations, expected 2 or more"):
        quantise_klt(forward._replace(turns=(0, 1, 0)), k, v, slots, torch.zeros((1, 5, 6), device=DEVICE), 0)
    with pytest.raises(ValueError, match="3 layers, expected 2"):
        quantise_klt(forward._replace(turns=(0, 0)), k, v, slots, None, 0)
    with pytest.raises(ValueError, match="matrix"):
        quantise_klt(forward._replace(matrix=forward.matrix[1:]), k, v, slots, None, 0)
    with pytest.raises(ValueError, match="no buffers, expected one a layer"):
        quantise_klt(forward, [], v, slots, None, 0)
    with pytest.raises(ValueError, match=r"buffers differ: .*\(1024, 2, 16\).*\(1023, 2, 16\)"):
        quantise_klt(forward, [*k[:2], k[2][1:]], v, slots, None, 0)
    with pytest.raises(ValueError, match="expected the last to be 1"):
        quantise_klt(forward, [x.mT for x in k], v, slots, None, 0)
    with pytest.raises(ValueError, match="expected int64"):
        quantise_klt(forward, k, v, slots.int(), None, 0)
    if DEVICE.type == "cpu":
        with pytest.raises(ValueError, match=r"slot 1024 is outside a buffer of shape \(1024, 2, 16\)"):
            quantise_klt(forward, k, v, torch.arange(1020, 1025), None, 0)
    assert quantise_klt(forward, k, v, slots[:0], None, 0)[0].numel() == 0
