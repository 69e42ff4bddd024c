from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.codec.method import KVShape
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.ours import KltMethod, our_methods
from benchmarks.codec.segments import segments_of
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.segment import cell_place
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.profile import CurvePoint
from sgl_kvfetch.errors import ConfigError
from tests.codec.quant.profiles import make_profile, values_of


def test_klt_trades_bits_for_error() -> None:
    profile = make_profile()
    k, v = (x.bfloat16() for x in values_of(profile, 192))
    methods = {method.name: method for method in our_methods(profile)}
    coded = [methods[f"klt-{kl}/hevc"].code(k, v) for kl in ("1e-05", "0.0001", "0.001")]
    sizes = [c.num_bytes for c in coded]
    errors = [float((c.k.float() - k.float()).square().mean()) for c in coded]
    assert sizes == sorted(sizes, reverse=True)
    assert errors == sorted(errors)
    assert errors[0] < errors[2] / 4
    assert sizes[0] < KVShape.of(k, v).raw_bytes / 2
    # Another codec gives the same values.
    assert methods["klt-0.0001/zstd"].code(k, v).k.equal(coded[1].k)


@pytest.mark.parametrize("codec", ["hevc", "zstd"])
def test_sizes_tell_second_integers_and_exact_tokens_apart(codec: str) -> None:
    profile = make_profile(num_layers=4, cell_heads=2, num_sinks=2)
    k, v = (x.bfloat16() for x in values_of(profile, 128))
    fine, coarse = (KltMethod(kl, codec, "", profile) for kl in (1e-5, 1e-2))
    sizes = fine.sizes(fine.encode(k, v))
    assert sizes["second integers"] > 0
    integers = [_coefficients(fine, k, v, wide) for wide in (True, False)]
    assert sizes["coefficients"] + sizes["second integers"] == integers[0]
    assert sizes["coefficients"] == integers[1]
    assert sizes["exact"] > 0.9 * 2 * 2 * (k[0].numel() + v[0].numel())  # two tokens of two bytes a value: noise
    assert coarse.sizes(coarse.encode(k, v))["second integers"] == 0
    sinkless = KltMethod(1e-5, codec, "", replace(profile, num_sinks=0))
    assert sinkless.sizes(sinkless.encode(k, v))["exact"] < sizes["exact"] / 2


def _coefficients(method: KltMethod, k: torch.Tensor, v: torch.Tensor, with_wide: bool) -> int:
    """The bytes of all cells' coefficients, coded with or without their second integers."""
    ((manifest, _),) = segments_of(method.encode(k, v))
    layout = manifest.variants[0].layouts["coefficients"]
    num_bytes = 0
    for cell in manifest.cells():
        place = cell_place(manifest, cell)
        _, _, integers = method.klt.quantise(CellValues(k, v).cell(place.layers, place.heads), place)
        num_channels = method.klt.profile.cells[cell[1:]].num_channels  # so many are kept at a step this fine
        kept = len(integers) if with_wide else num_channels
        num_bytes += len(get_codec(method.codec).encode(layout.to_frames(integers[:kept])))
    return num_bytes


def test_rates_that_were_not_measured_are_left_out() -> None:
    narrow = replace(make_profile(), curve=(CurvePoint(0.5, 2e-5, 2.0), CurvePoint(1.0, 2e-3, 1.0)))
    names = [method.name for method in our_methods(narrow) if method.name.startswith("klt")]
    assert names == [f"{name}/{codec}" for codec in ("hevc", "zstd") for name in ("klt", "klt-0.0001", "klt-0.001")]


def test_select() -> None:
    methods = all_methods(None)
    assert select(methods, []) == methods
    assert [m.name for m in select(methods, ["kivi-?", "exact/*"])] == ["exact/hevc", "exact/zstd", "kivi-4", "kivi-2"]
    with pytest.raises(ConfigError, match="no method matches 'kivi'"):
        select(methods, ["exact/*", "kivi"])
