"""The kernels that quantise `klt`, beside ``KltQuantiser.quantise``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache

import pytest
import torch

from harness.layer_maps import plain_layers
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser
from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.triton_kernels import quantise_klt
from sgl_kvfetch.triton_kernels.quantise_klt import NOT_FINITE, KltCells, KltInput
from tests.codec.quant.profiles import make_profile, place_of, values_of
from tests.triton_kernels.cases import DEVICE, FLOATS, Shape, make_buffers, scattered_slots

pytestmark = pytest.mark.slow

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


def there(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def inputs_there(
    quantiser: KltQuantiser, values: CellValues, places: Sequence[CellPlace]
) -> tuple[list[KltInput], torch.Tensor]:
    """Return cells whose values are in scattered slots of a larger pool, and these slots. ``values``: of all layers and
    heads that the places have."""
    slots, (num_layers, heads) = scattered_slots(len(places[0].tokens)), values.k.shape[1:3]
    sides = []
    for x in values:
        buffers = make_buffers(Shape(len(slots), num_layers, heads + 1, x.shape[3]), x.dtype)
        for index, buffer in enumerate(buffers):
            buffer[slots, 1:] = x[:, index].to(DEVICE)
        sides.append([buffer[:, 1:] for buffer in buffers])
    first_layer, first_head = places[0].layers.start, places[0].heads.start
    inputs = []
    for place in places:
        layers = slice(place.layers.start - first_layer, place.layers.stop - first_layer)
        of_heads = slice(place.heads.start - first_head, place.heads.stop - first_head)
        k, v = ([buffer[:, of_heads] for buffer in buffers[layers]] for buffers in sides)
        inputs.append(KltInput(quantiser.forward(place), k, v))
    return inputs, slots


def quantised_all(
    quantiser: KltQuantiser, values: CellValues, places: Sequence[CellPlace]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the exponents and integers that the kernels make of each cell."""
    tokens, of_layers = places[0].tokens, quantiser.profile.rotations
    inputs, slots = inputs_there(quantiser, values, places)
    rotations = None if of_layers is None else of_layers.inverse_table(tokens.start, len(tokens)).to(DEVICE)
    cells = KltCells(inputs, there)
    output = torch.full((cells.output_rows, len(tokens)), 0xAB, dtype=torch.uint8, device=DEVICE)
    cells.quantise(slots, rotations, max(0, quantiser.profile.num_sinks - tokens.start), output)
    exponents, *integers = output.cpu().split((len(inputs), *cells.num_rows))
    return list(zip(exponents, integers, strict=True))


def coefficients_of(quantiser: KltQuantiser, integers: torch.Tensor, place: CellPlace) -> torch.Tensor:
    """Return coefficients of one or two integers, in steps."""
    forward = quantiser.forward(place)
    n = integers.long() - 128
    found, wide = n[: forward.kept].clone(), forward.bits.nonzero().flatten()
    found[wide] += n[forward.high[wide].long()] << forward.bits[wide, None].long()
    return found


def assert_as_the_quantiser(
    quantiser: KltQuantiser, values: CellValues, place: CellPlace, made: tuple[torch.Tensor, torch.Tensor] | None = None
) -> torch.Tensor:
    """But for roundings that the order of sums tips: few, and by one. Return the exponents. ``made``: what kernels have
    made of the cell; by default, they run."""
    wanted, _, integers = quantiser.quantise(values, place)
    exponents, found = made or quantised_all(quantiser, values, [place])[0]
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


@pytest.mark.parametrize("scratch_bytes", [1, 50_000, 1 << 20])
def test_many_cells_in_few_launches(scratch_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups of layers, the last of which has fewer, and two blocks of heads; whatever is in one launch."""
    monkeypatch.setattr(klt, "_HAS_BFLOAT16", False)
    monkeypatch.setattr(quantise_klt, "_SCRATCH_BYTES", scratch_bytes)
    profile = make_profile(num_layers=4, num_heads=4, v_head_dim=24, cell_heads=2, layers=MIXED, num_sinks=2)
    quantiser = KltQuantiser(profile, step=0.5)
    places = [place_of(profile, key, 33, FIRST_TOKEN) for key in profile.cells]
    values = CellValues(*(x.bfloat16() for x in values_of(profile, 33, FIRST_TOKEN)))
    batches = list(KltCells(inputs_there(quantiser, values, places)[0], there)._batches(33))
    assert len(batches) == {1: 4, 50_000: 3, 1 << 20: 1}[scratch_bytes]
    for made, place in zip(quantised_all(quantiser, values, places), places, strict=True):
        assert_as_the_quantiser(quantiser, values.cell(place.layers, place.heads), place, made)


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
    ((exponents, integers),) = quantised_all(quantiser, values, [place])
    assert (exponents == NOT_FINITE).nonzero().flatten().tolist() == [3, 30]
    assert bool((integers[:, [0, 3, 7, 20, 30]] == 128).all())


def test_tensors_that_do_not_fit_are_refused() -> None:
    quantiser = KltQuantiser(profile_of(plain_layers(4)), step=2.0)
    forward = quantiser.forward(place_of(quantiser.profile, (0, 0), 5))
    k, v = (make_buffers(Shape(5, 3, 2, dim), torch.float32) for dim in (16, 24))
    for message, wrong, *sides in (
        ("240 channels, expected 288", forward, k, [*v, v[0]]),
        ("matrix", forward._replace(matrix=forward.matrix[1:]), k, v),
        ("3 layers, expected 2", forward._replace(turns=(0, 0)), k, v),
        ("no buffers, expected one a layer", forward, [], v),
        (r"buffers differ: .*\(1024, 2, 16\).*\(1023, 2, 16\)", forward, [*k[:2], k[2][1:]], v),
        ("expected the last to be 1", forward, [x.mT for x in k], v),
    ):
        with pytest.raises(ValueError, match=message):
            KltCells([KltInput(wrong, *sides)], there)
    with pytest.raises(UnsupportedError, match=r"have no torch\.float64"):
        KltCells([KltInput(forward, [x.double() for x in k], v)], there)

    cells, slots = KltCells([KltInput(forward, k, v)], there), scattered_slots(5)
    mixed = KltCells([KltInput(forward._replace(turns=(0, 1, 0)), k, v)], there)
    output, rotations = torch.empty((cells.output_rows, 5), dtype=torch.uint8, device=DEVICE), torch.zeros((1, 5, 18))
    for message, of, taken, table, out in (
        ("rotation", cells, slots, rotations[:, :4, :6], output),
        ("rotation of 18 of 16 values", cells, slots, rotations, output),
        ("1 rotations, expected 2 or more", mixed, slots, rotations[..., :6], output),
        ("output", cells, slots, None, output[:, 1:]),
        ("expected int64", cells, slots.int(), None, output),
        *([("slot 1024 is outside a buffer", cells, torch.arange(1020, 1025), None, output)] * (DEVICE.type == "cpu")),
    ):
        with pytest.raises(ValueError, match=message):
            of.quantise(taken, None if table is None else table.contiguous().to(DEVICE), 0, out)
    cells.quantise(slots[:0], None, 0, output[:, :0].contiguous())
