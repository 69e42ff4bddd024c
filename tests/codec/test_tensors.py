"""K and V of a prompt as bytes, and back."""

from __future__ import annotations

import pytest
import torch

from sgl_kvfetch.codec import compress, decompress
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.errors import ConfigError, FormatError
from tests.codec.quant.profiles import make_profile, values_of


@pytest.mark.parametrize("num_tokens", [1, 130, 1024, 1025, 4099])
def test_exact_gives_back_every_bit_of_a_prompt_of_any_length(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    k, v = (torch.randn(num_tokens, 3, 2, dim, generator=generator).bfloat16() for dim in (16, 24))
    compressed = compress(k, v)
    assert compressed.kl == 0
    assert compressed.bits_per_value == 8 * len(compressed.data) / (k.numel() + v.numel())
    for x, restored in zip((k, v), decompress(compressed.data), strict=True):
        assert torch.equal(x, restored)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return make_profile(rope=Rope(inv_freq=tuple(0.3**i for i in range(8))))


def test_a_finer_target_of_klt_takes_more_bytes_and_loses_less(profile: Profile) -> None:
    values = values_of(profile, 1500)
    coarse, fine = (compress(values.k, values.v, profile, kl) for kl in (5e-3, 2e-5))
    assert coarse.kl == pytest.approx(5e-3, rel=1e-2)
    assert fine.kl == pytest.approx(2e-5, rel=1e-2)
    assert len(coarse.data) < len(fine.data) / 2
    errors = []
    for compressed in (coarse, fine):
        restored = decompress(compressed.data, profile)
        assert [x.shape for x in restored] == [x.shape for x in values]
        errors.append(max(float((x - y).norm() / x.norm()) for x, y in zip(values, restored, strict=True)))
    assert errors[1] < errors[0] / 4
    assert errors[0] < 0.3


def test_what_does_not_belong_together_is_refused_by_name(profile: Profile) -> None:
    values = values_of(profile, 40)
    with pytest.raises(ConfigError, match=r"k is \(40, 3, 4, 16\) of torch.float32 and v \(39, 3, 4, 16\)"):
        compress(values.k, values.v[1:])
    with pytest.raises(ConfigError, match="have a token"):
        compress(values.k[:0], values.v[:0])
    with pytest.raises(ConfigError, match="have 2 layers of 4 heads of 16 and 16 channels, the profile 3 of 4"):
        compress(values.k[:, :2], values.v[:, :2], profile)
    with pytest.raises(ConfigError, match=r"target_kl = 0\.001 needs a profile"):
        compress(values.k, values.v, target_kl=1e-3)
    with pytest.raises(ConfigError, match="outside this profile's range"):
        compress(values.k, values.v, profile, 1.0)
    data = compress(values.k, values.v, profile).data
    with pytest.raises(ConfigError, match="no profile was given"):
        decompress(data)
    with pytest.raises(ConfigError, match="the profile given is"):
        decompress(data, make_profile(num_sinks=3))


@pytest.mark.parametrize("cut", [0, 3, 11, 200, -1])
def test_bytes_that_are_cut_or_changed_are_damaged(cut: int) -> None:
    k = v = torch.ones(70, 2, 2, 16, dtype=torch.bfloat16)
    data = compress(k, v).data
    with pytest.raises(FormatError):
        decompress(data[:cut])
    with pytest.raises(FormatError):
        decompress(data[:-3] + bytes(3 * [255 ^ data[-1]]))
    with pytest.raises(FormatError, match="71 tokens in 70 places"):
        decompress(data[:4] + (71).to_bytes(4, "little") + data[8:])
