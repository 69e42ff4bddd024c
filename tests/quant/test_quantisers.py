import pytest
import torch

from sgl_kvfetch.errors import ConfigError, FormatError, QuantiseError
from sgl_kvfetch.quant import Quantiser, make_quantiser, quantiser_from_identity
from sgl_kvfetch.types import KV_DTYPES, torch_dtype

DTYPES = list(KV_DTYPES)


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Every bit pattern may come: NaNs with payloads, infinities, denormals, both zeros."""
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_gives_every_bit_back(dtype: str) -> None:
    quantiser = make_quantiser("exact")
    values = random_bits(torch_dtype(dtype), (7, 5, 3, 50))
    quantised = quantiser.quantise(values, "k", 0)
    assert quantised.scales is None
    assert quantised.integers.shape == (quantiser.planes(values.dtype), 7, 5, 3, 50)
    restored = quantiser.dequantise(quantised, values.dtype, "k", 0)
    assert torch.equal(restored.view(torch.uint8), values.contiguous().view(torch.uint8))


def test_exact_puts_the_exponent_in_the_last_plane_and_the_sign_in_the_last_bit() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = torch.tensor([1.0, -1.0, 2.0, -0.25], dtype=dtype).view(4, 1, 1, 1)
        planes = make_quantiser("exact").quantise(values, "k", 0).integers.flatten(1)
        assert planes[-1].tolist() == [127, 127, 128, 125]
        assert (planes[0] & 1).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("name", ["uint8", "cachegen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_error_is_at_most_half_a_step(name: str, dtype: str) -> None:
    quantiser = make_quantiser(name)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    spread = torch.rand((63, 5, 3, 1), generator=generator) * 10
    values = (torch.randn((63, 5, 3, 80), generator=generator) * spread).to(torch_dtype(dtype))
    quantised = quantiser.quantise(values, "v", 0)
    assert quantised.scales is not None
    assert quantised.scales.shape == (63, 5, quantiser.scales_per_layer(3))
    restored = quantiser.dequantise(quantised, values.dtype, "v", 0)
    step = quantised.scales.float().unsqueeze(-1)
    rounding = torch.finfo(values.dtype).eps * values.float().abs().amax()
    assert ((restored.float() - values.float()).abs() <= step / 2 + rounding).all()


def test_zeros_and_the_smallest_values_stay_finite() -> None:
    values = torch.zeros((3, 2, 2, 48))
    values[1] = 1e-45
    for name in ("uint8", "cachegen"):
        quantiser = make_quantiser(name)  # type: ignore[arg-type]
        restored = quantiser.dequantise(quantiser.quantise(values, "k", 0), values.dtype, "k", 0)
        assert (restored[0] == 0).all()
        assert torch.isfinite(restored).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_largest_values_stay_finite(dtype: str) -> None:
    largest = torch.finfo(torch_dtype(dtype)).max
    values = torch.full((3, 2, 2, 48), largest).to(torch_dtype(dtype))
    values[1:] = -values[1:]
    for name, bins in (("uint8", None), ("cachegen", None), ("cachegen", [4])):
        quantiser = make_quantiser(name, k_bins=bins)  # type: ignore[arg-type]
        restored = quantiser.dequantise(quantiser.quantise(values, "k", 0), values.dtype, "k", 0)
        assert torch.isfinite(restored).all()
        assert (restored.double() / values.double() > 0.98).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    values = torch.zeros((3, 2, 2, 48))
    values[1, 1, 1, 7] = bad
    for name in ("uint8", "cachegen"):
        with pytest.raises(QuantiseError, match="not finite"):
            make_quantiser(name).quantise(values, "k", 0)  # type: ignore[arg-type]


def test_cachegen_bins_go_by_the_models_layer() -> None:
    quantiser = make_quantiser("cachegen", k_bins=[64, 16], v_bins=[8])
    values = torch.randn((5, 3, 2, 48), generator=torch.Generator().manual_seed(3))
    from_start = quantiser.quantise(values, "k", 0).integers[0].amax(dim=(0, 2, 3))
    assert from_start.tolist() == [62, 14, 14]
    from_second = quantiser.quantise(values, "k", 1).integers[0].amax(dim=(0, 2, 3))
    assert from_second.tolist() == [14, 14, 14]
    assert quantiser.quantise(values, "v", 0).integers.max() == 6


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
    values = torch.randn((5, 3, 2, 48), generator=torch.Generator().manual_seed(4))
    assert torch.equal(again.quantise(values, "k", 1).integers, quantiser.quantise(values, "k", 1).integers)


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
