"""What every quantiser promises, and what single ones promise beside; `test_klt` has the rest of ``klt``'s."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream.ans import AnsTablesCodec
from sgl_kvfetch.codec.layout.frames import FLAT, tile_layout
from sgl_kvfetch.codec.quant import PlainQuantiserName, _exact
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantiser, join_parts
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.types import KV_DTYPES, torch_dtype
from tests.codec.quant.hostile import KINDS, hostile
from tests.codec.quant.profiles import PRODUCTS, make_profile, place_of as place_in, products, values_of

DTYPES = list(KV_DTYPES)
PROFILE = make_profile(num_sinks=3, rope=Rope(inv_freq=(1.0, 0.1)))
NUM_TOKENS = 30
# Each with how it multiplies: only ``klt`` depends on the CPU.
QUANTISERS: dict[str, tuple[Quantiser | type[KltQuantiser], str]] = {
    "exact": (make_quantiser("exact"), PRODUCTS[0]),
    "uint8": (make_quantiser("uint8"), PRODUCTS[0]),
    "cachegen": (make_quantiser("cachegen"), PRODUCTS[0]),
    "cachegen with bins": (make_quantiser("cachegen", k_bins=[64, 4], v_bins=[256]), PRODUCTS[0]),
} | {f"klt {how}": (KltQuantiser, how) for how in PRODUCTS[:2]}


@pytest.fixture(params=QUANTISERS)
def quantiser(request: pytest.FixtureRequest) -> Iterator[Quantiser]:
    made, how = QUANTISERS[request.param]
    with products(how):
        yield made if isinstance(made, Quantiser) else made(PROFILE, step=0.5)


def values_for(dtype: torch.dtype, first_token: int = 0) -> tuple[CellValues, CellPlace]:
    """Values that all quantisers take, and their place. The large ones of one token are kept exact by ``klt``."""
    values = CellValues(*(x.to(dtype) for x in values_of(PROFILE, NUM_TOKENS, first_token)))
    values.k[9] *= 1e4
    return values, place_in(PROFILE, (0, 0), NUM_TOKENS, first_token)


def place_of(values: CellValues) -> CellPlace:
    return CellPlace(*map(range, (*values.k.shape[1:3], len(values.k))))


def there_and_back(quantiser: Quantiser, values: CellValues) -> CellValues:
    return quantiser.dequantise(quantiser.quantise(values, place_of(values)), values.k.dtype, place_of(values))


def test_a_run_of_tokens_is_restored_as_the_whole_is(quantiser: Quantiser) -> None:
    values, place = values_for(torch.bfloat16)
    quantised = quantiser.quantise(values, place)
    whole = quantiser.dequantise(quantised, torch.bfloat16, place)
    for tokens in (slice(0, 2), slice(1, 9), slice(5, 30), slice(29, 30)):
        part = quantiser.dequantise(quantised, torch.bfloat16, place, tokens)
        assert all(torch.equal(p, w[tokens]) for p, w in zip(part, whole, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_neighbours_join_to_those_of_the_whole(quantiser: Quantiser, dtype: torch.dtype) -> None:
    values, place = values_for(dtype)
    pieces = [
        quantiser.quantise(values.tokens(slice(a, b)), place_in(PROFILE, (0, 0), b - a, a))
        for a, b in ((0, 5), (5, 30))
    ]
    whole = quantiser.quantise(values, place)
    assert not isinstance(quantiser, KltQuantiser) or (whole[0] == EXACT).nonzero().flatten().tolist() == [0, 1, 2, 9]
    joined = join_parts(quantiser.parts(dtype), pieces)
    assert all(torch.equal(x, y) for x, y in zip(joined, whole, strict=True))


def test_an_identity_gives_its_quantiser_back(quantiser: Quantiser) -> None:
    """Of ``klt``, what needs no profile."""
    again = quantiser_from_identity(quantiser.identity)
    assert again.identity == quantiser.identity
    assert again.parts(torch.bfloat16) == quantiser.parts(torch.bfloat16)
    if not isinstance(quantiser, KltQuantiser):
        values, place = values_for(torch.bfloat16)
        parts, expected = (each.quantise(values, place) for each in (again, quantiser))
        assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))
    else:
        with pytest.raises(QuantiseError, match="needs its profile"):
            again.quantise(*values_for(torch.bfloat16))


def test_identities_differ() -> None:
    cell = PROFILE.cells[0, 0]
    others = replace(PROFILE, num_sinks=1), replace(PROFILE, cells={(0, 0): replace(cell, mean=cell.mean + 1)})
    quantisers = [made for made, _ in QUANTISERS.values() if isinstance(made, Quantiser)]
    quantisers += [make_quantiser("cachegen", k_bins=[32]), make_quantiser("cachegen", v_bins=[32])]
    quantisers += [KltQuantiser(PROFILE, step=step) for step in (0.5, 0.25)]
    quantisers += [KltQuantiser(other, step=0.5) for other in others]
    assert len({each.identity for each in quantisers}) == len(quantisers) == 10


def test_the_largest_and_the_smallest_values_stay_finite(quantiser: Quantiser) -> None:
    """``klt`` adds them up in float32, which does not hold sums of the largest that float32 and bfloat16 do."""
    of_klt = isinstance(quantiser, KltQuantiser)
    for dtype in (torch_dtype(name) for name in DTYPES if not (of_klt and name in ("float32", "bfloat16"))):
        largest = torch.full((3, 3, 4, 16), torch.finfo(dtype).max)
        largest[1:] = -largest[1:]
        values = CellValues(largest.to(dtype), largest.to(dtype))
        for restored in there_and_back(quantiser, values):
            assert torch.isfinite(restored.float()).all()
            assert of_klt or (restored.double() / values.k.double() > 0.98).all()
    smallest = torch.zeros((3, 3, 4, 16))
    smallest[1] = 1e-45
    for restored in there_and_back(quantiser, CellValues(smallest, smallest)):
        assert torch.isfinite(restored).all()
        assert of_klt or (restored[0] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_not_finite_is_refused(quantiser: Quantiser, dtype: torch.dtype) -> None:
    for tensor in (0, 1):
        for bad in (torch.nan, torch.inf, -torch.inf):
            values, place = values_for(dtype)
            values[tensor][NUM_TOKENS - 1, 2, 3, 15] = bad
            if quantiser.is_lossless:
                quantiser.quantise(values, place)
                continue
            with pytest.raises(QuantiseError, match="not finite"):
                quantiser.quantise(values, place)


CASES = int(os.environ.get("KVFETCH_EXACT_CASES", "1000"))


def test_hostile_cells_come_back_in_pages_of_any_layout_and_nothing_else_is_written() -> None:
    """Coded by each implementation, decoded by both. KVFETCH_EXACT_CASES is the number of cells."""
    quantiser, codecs = make_quantiser("exact"), (AnsTablesCodec(), AnsTablesCodec(is_portable=True))
    for seed in range(CASES):
        pick, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        dtype = torch_dtype(DTYPES[seed % len(DTYPES)])
        page_size, num_pages = pick.choice([1, 3, 16, 64]), pick.randint(1, 6)
        layers, heads = pick.randint(1, 3), pick.randint(1, 3)
        kind, shape = pick.choice(KINDS), (num_pages * page_size, layers, heads)
        values = CellValues(*(hostile((*shape, pick.choice([8, 24])), dtype, kind, generator) for _ in "kv"))
        planes = quantiser.quantise(values, place_of(values))
        decoded = []
        for plane in planes:
            layout = tile_layout(heads, plane.shape[3], len(plane), FLAT)
            bitstream = codecs[seed % 2].encode(frames := layout.to_frames(plane))
            found = [codec.decode(bitstream, (len(frames), 1, frames.shape[3])) for codec in codecs]
            assert torch.equal(*found)
            decoded.append(layout.from_frames(found[0], tuple(plane.shape)))
        places = pick.sample([*range(2 * num_pages), *[-1] * num_pages], num_pages)
        sizes = [(layers + 2, 2 * num_pages, page_size, heads + 1, x.shape[3]) for x in values]
        pools = [hostile(size, dtype, "bits", generator) for size in sizes]
        views = [pool[1:-1, :, :, 1:].permute(1, 2, 0, 3, 4) for pool in pools]
        expected = [pool.clone().view(torch.uint8) for pool in pools]
        for before, x in zip(expected, values, strict=True):
            pages = x.view(torch.uint8).view(num_pages, page_size, layers, heads, -1).permute(0, 2, 1, 3, 4)
            for page, place_ in enumerate(places):
                if place_ >= 0:
                    before[1:-1, place_, :, 1:] = pages[page]
        quantiser.restore_pages(tuple(decoded), views, places)
        assert all(torch.equal(pool.view(torch.uint8), x) for pool, x in zip(pools, expected, strict=True)), seed


def test_pages_and_planes_that_do_not_fit_are_refused() -> None:
    """The native half writes only where the arguments are."""
    pages, planes = np.zeros((4, 18), np.uint8), [bytearray(18), bytearray(18)]
    few: list[list[bytearray]] = [[], [bytearray(18), bytearray(17)], [bytearray(18)] * 9]
    for wrong, places in ((planes, [0]), (planes, [0, 4]), (planes, [-2, 0]), *((each, [0, 1]) for each in few)):
        with pytest.raises(ValueError, match=r"do not fit|is not one of 4"):
            _exact.join(wrong, pages.data, np.array(places, np.int64).data)
    for wrong, first in (*((each, 0) for each in few), (planes, -1), (planes, 1)):
        with pytest.raises(ValueError, match="do not fit"):
            _exact.split(pages[:2].data, wrong, first)


@pytest.mark.parametrize("name", ["uint8", "cachegen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_is_at_most_half_a_step(name: PlainQuantiserName, dtype: str) -> None:
    quantiser = make_quantiser(name)
    generator = torch.Generator().manual_seed(2)
    spread = torch.rand((63, 3, 3, 1), generator=generator) * 10
    values = CellValues(
        *((torch.randn((63, 3, 3, 80), generator=generator) * spread).to(torch_dtype(dtype)) for _ in "kv")
    )
    k_scales, _, v_scales, _ = quantised = quantiser.quantise(values, place_of(values))
    restored = quantiser.dequantise(quantised, values.k.dtype, place_of(values))
    num_scales = 3 if name == "uint8" else 1
    for scales, x, y in zip((k_scales, v_scales), values, restored, strict=True):
        step = scales.view(torch.bfloat16).view(63, 3, num_scales, 1).float()
        rounding = torch.finfo(x.dtype).eps * x.float().abs().amax()
        assert ((y.float() - x.float()).abs() <= step / 2 + rounding).all()


def test_cachegen_bins_go_by_the_models_layer() -> None:
    with pytest.raises(ConfigError, match=r"k_bins = \[2\].*4 to 256"):
        make_quantiser("cachegen", k_bins=[2])
    quantiser = make_quantiser("cachegen", k_bins=[64, 16], v_bins=[8])
    x = torch.randn((5, 3, 2, 48), generator=torch.Generator().manual_seed(3))
    for first, expected in ((0, [62, 14, 14]), (1, [14, 14, 14])):
        _, k, _, v = quantiser.quantise(CellValues(x, x), CellPlace(range(first, first + 3), range(2), range(5)))
        assert k.amax(dim=(0, 2, 3)).tolist() == expected
        assert v.max() == 6


@pytest.mark.parametrize(
    "identity",
    ["", "Exact", "exact ", "uint8", "uint8(k=128;v=256)", "cachegen()"]
    + [f"cachegen(k={bins})" for bins in ("2;v=16", "300;v=16", "32,;v=16", "32;v=16)x", "999999999999;v=16")],
)
def test_an_unknown_identity_is_a_format_error(identity: str) -> None:
    with pytest.raises(FormatError, match="quantiser"):
        quantiser_from_identity(identity)
