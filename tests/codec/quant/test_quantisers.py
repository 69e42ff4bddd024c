import os
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream.ans import AnsTablesCodec
from sgl_kvfetch.codec.layout.frames import FLAT, tile_layout
from sgl_kvfetch.codec.quant import PlainQuantiserName, _exact
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantiser, join_parts, to_planes
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.types import KV_DTYPES, torch_dtype
from tests.codec.quant.hostile import KINDS, hostile

DTYPES = list(KV_DTYPES)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern may come: NaNs with payloads, infinities, denormals, both zeros."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def place(num_tokens: int, layers: range, num_heads: int) -> CellPlace:
    return CellPlace(layers, range(num_heads), range(num_tokens))


def place_of(values: CellValues) -> CellPlace:
    num_tokens, num_layers, num_heads, _ = values.k.shape
    return place(num_tokens, range(num_layers), num_heads)


def there_and_back(quantiser: Quantiser, values: CellValues) -> CellValues:
    return quantiser.dequantise(quantiser.quantise(values, place_of(values)), values.k.dtype, place_of(values))


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_gives_every_bit_back(dtype: str) -> None:
    quantiser = make_quantiser("exact")
    values = CellValues(*(random_bits(torch_dtype(dtype), (7, 3, 3, dim)) for dim in (50, 34)))
    quantised = quantiser.quantise(values, place_of(values))
    assert len(quantised) == len(quantiser.parts(values.k.dtype)) == 2 * values.k.dtype.itemsize
    for restored, x in zip(there_and_back(quantiser, values), values, strict=True):
        assert torch.equal(restored.view(torch.uint8), x.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen"])
def test_a_run_of_tokens_is_restored_as_the_whole_is(name: PlainQuantiserName) -> None:
    quantiser = make_quantiser(name)
    values = CellValues(*torch.randn((2, 9, 3, 2, 48), generator=torch.Generator().manual_seed(5)).bfloat16())
    quantised = quantiser.quantise(values, place_of(values))
    whole = quantiser.dequantise(quantised, torch.bfloat16, place_of(values))
    part = quantiser.dequantise(quantised, torch.bfloat16, place_of(values), slice(4, 7))
    assert all(torch.equal(x, y[4:7]) for x, y in zip(part, whole, strict=True))


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen"])
def test_parts_of_neighbours_join_to_those_of_the_whole(name: PlainQuantiserName) -> None:
    quantiser = make_quantiser(name)
    values = CellValues(*torch.randn((2, 9, 3, 2, 48), generator=torch.Generator().manual_seed(6)).bfloat16())
    pieces = [values.tokens(slice(0, 4)), values.tokens(slice(4, 9))]
    joined = join_parts(quantiser.parts(torch.bfloat16), [quantiser.quantise(x, place_of(x)) for x in pieces])
    whole = quantiser.quantise(values, place_of(values))
    assert all(torch.equal(x, y) for x, y in zip(joined, whole, strict=True))


def test_exact_puts_the_exponent_in_the_last_plane_and_the_sign_in_the_last_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.tensor([1.0, -1.0, 2.0, -0.25], dtype=dtype).view(4, 1, 1, 1)
        planes = torch.stack(to_planes(values)).flatten(1)
        assert planes[-1].tolist() == [127, 127, 128, 125]
        assert (planes[0] & 1).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("size", range(1, 9))
def test_planes_are_joined_into_strided_values(size: int) -> None:
    chance = np.random.default_rng(size)
    memory = chance.integers(0, 256, (5, 3, 4, 7 * size), np.uint8)
    values = memory[:, ::2, 1:3]
    planes = [np.zeros(values.size // size + 2, np.uint8) for _ in range(size)]
    _exact.split(values.data, [plane.data for plane in planes], 2)
    assert not any(plane[:2].any() for plane in planes)
    joined = np.zeros_like(memory)
    _exact.join([plane[2:].data for plane in planes], joined[None, :, ::2, 1:3].data, bytes(8))
    assert np.array_equal(joined[:, ::2, 1:3], values)
    joined[:, ::2, 1:3] = 0
    assert not joined.any()


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
        pools = [random_bits(dtype, (layers + 2, 2 * num_pages, page_size, heads + 1, x.shape[3])) for x in values]
        views = [pool[1:-1, :, :, 1:].permute(1, 2, 0, 3, 4) for pool in pools]
        expected = [pool.clone().view(torch.uint8) for pool in pools]
        for before, x in zip(expected, values, strict=True):
            pages = x.view(torch.uint8).view(num_pages, page_size, layers, heads, -1).permute(0, 2, 1, 3, 4)
            for page, place_ in enumerate(places):
                if place_ >= 0:
                    before[1:-1, place_, :, 1:] = pages[page]
        quantiser.restore_pages(tuple(decoded), views, places)
        assert all(torch.equal(pool.view(torch.uint8), x) for pool, x in zip(pools, expected, strict=True)), seed


def test_pages_that_do_not_fit_are_refused() -> None:
    pages, planes = np.zeros((4, 3, 6), np.uint8), [bytearray(18), bytearray(18)]

    def join(planes: Sequence[bytearray], pages: np.ndarray, places: Sequence[int]) -> None:
        _exact.join(planes, pages.data, np.array(places, np.int64).data)

    join(planes, pages, [0, -1])
    for wrong in ([], [0], [0, 1, 2]):
        with pytest.raises(ValueError, match=f"2 planes of 18 bytes do not fit {len(wrong)} pages of 18 bytes"):
            join(planes, pages, wrong)
    for wrong in ([0, 4], [-2, 0], [1 << 40, 0]):
        with pytest.raises(ValueError, match="is not one of 4"):
            join(planes, pages, wrong)
    for few in ([], [bytearray(18), bytearray(17)], [bytearray(18)] * 9, [bytearray(18)] * 4):
        with pytest.raises(ValueError, match="do not fit"):
            join(few, pages, [0, 1])
    with pytest.raises(ValueError, match="do not fit"):
        join(planes, pages.reshape(-1), [0, 1])
    with pytest.raises(ValueError, match="do not fit"):
        _exact.join(planes, pages.data, bytes(15))


def test_planes_that_do_not_fit_are_refused() -> None:
    values = np.zeros((4, 6), np.uint8)
    for planes in ([], [bytearray(12)], [bytearray(12), bytearray(11)], [bytearray(3)] * 9):
        with pytest.raises(ValueError, match="24 bytes of values do not fit"):
            _exact.split(values.data, planes, 0)
    for first in (-1, 1, 13):
        with pytest.raises(ValueError, match="at"):
            _exact.split(values.data, [bytearray(12), bytearray(12)], first)
    with pytest.raises(BufferError):
        _exact.split(values.data, [bytes(12), bytes(12)], 0)


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


def test_zeros_and_the_smallest_values_stay_finite() -> None:
    values = torch.zeros((3, 2, 2, 48))
    values[1] = 1e-45
    for name in ("uint8", "cachegen"):
        for restored in there_and_back(make_quantiser(name), CellValues(values, values)):
            assert (restored[0] == 0).all()
            assert torch.isfinite(restored).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_largest_values_stay_finite(dtype: str) -> None:
    largest = torch.finfo(torch_dtype(dtype)).max
    values = torch.full((3, 2, 2, 48), largest).to(torch_dtype(dtype))
    values[1:] = -values[1:]
    for quantiser in (make_quantiser("uint8"), make_quantiser("cachegen"), make_quantiser("cachegen", k_bins=[4])):
        restored = there_and_back(quantiser, CellValues(values, values)).k
        assert torch.isfinite(restored).all()
        assert (restored.double() / values.double() > 0.98).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    values = CellValues(torch.zeros((3, 2, 2, 48)), torch.zeros((3, 2, 2, 48)))
    values.v[1, 1, 1, 7] = bad
    for name in ("uint8", "cachegen"):
        with pytest.raises(QuantiseError, match="not finite"):
            make_quantiser(name).quantise(values, place_of(values))


def test_cachegen_bins_go_by_the_models_layer() -> None:
    quantiser = make_quantiser("cachegen", k_bins=[64, 16], v_bins=[8])
    x = torch.randn((5, 3, 2, 48), generator=torch.Generator().manual_seed(3))
    for first, expected in ((0, [62, 14, 14]), (1, [14, 14, 14])):
        _, k, _, v = quantiser.quantise(CellValues(x, x), place(5, range(first, first + 3), 2))
        assert k.amax(dim=(0, 2, 3)).tolist() == expected
        assert v.max() == 6


def test_identity_names_what_matters() -> None:
    identities = {
        make_quantiser("exact").identity,
        make_quantiser("uint8").identity,
        make_quantiser("cachegen").identity,
        make_quantiser("cachegen", k_bins=[32]).identity,
        make_quantiser("cachegen", v_bins=[32]).identity,
    }
    assert len(identities) == 5


def test_bad_bins_are_named() -> None:
    with pytest.raises(ConfigError, match=r"k_bins = \[2\].*4 to 256"):
        make_quantiser("cachegen", k_bins=[2])


@pytest.mark.parametrize(
    "quantiser",
    [
        make_quantiser("exact"),
        make_quantiser("uint8"),
        make_quantiser("cachegen"),
        make_quantiser("cachegen", k_bins=[64, 4], v_bins=[256]),
    ],
)
def test_an_identity_gives_its_quantiser_back(quantiser: Quantiser) -> None:
    again = quantiser_from_identity(quantiser.identity)
    assert again.identity == quantiser.identity
    x = torch.randn((5, 3, 2, 48), generator=torch.Generator().manual_seed(4))
    parts, expected = (q.quantise(CellValues(x, x), place(5, range(1, 4), 2)) for q in (again, quantiser))
    assert all(torch.equal(a, b) for a, b in zip(parts, expected, strict=True))


@pytest.mark.parametrize(
    "identity",
    [
        "",
        "Exact",
        "exact ",
        "uint8",
        "uint8(k=128;v=256)",
        "cachegen()",
        "cachegen(k=2;v=16)",
        "cachegen(k=300;v=16)",
        "cachegen(k=32,;v=16)",
        "cachegen(k=32;v=16)x",
        "cachegen(k=999999999999;v=16)",
    ],
)
def test_an_unknown_identity_is_a_format_error(identity: str) -> None:
    with pytest.raises(FormatError, match="quantiser"):
        quantiser_from_identity(identity)
