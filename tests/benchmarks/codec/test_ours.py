from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.codec.method import KVShape
from benchmarks.codec.methods import all_methods, select
from benchmarks.codec.ours import our_methods
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.quant.profile import CurvePoint
from tests.quant.profiles import make_profile, values_of


def test_klt_trades_bits_for_error() -> None:
    profile = make_profile()
    k, v = (values_of(profile, tensor, 192).bfloat16() for tensor in ("k", "v"))
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


def test_rates_that_were_not_measured_are_left_out() -> None:
    narrow = replace(make_profile(), curve=(CurvePoint(0.5, 2e-5, 2.0), CurvePoint(1.0, 2e-4, 1.0)))
    names = [method.name for method in our_methods(narrow) if method.name.startswith("klt")]
    assert names == ["klt-3e-05/hevc", "klt-0.0001/hevc", "klt-3e-05/zstd", "klt-0.0001/zstd"]


def test_select() -> None:
    methods = all_methods(None)
    assert select(methods, []) == methods
    assert [m.name for m in select(methods, ["kivi-?", "exact/*"])] == ["exact/hevc", "exact/zstd", "kivi-4", "kivi-2"]
    with pytest.raises(ConfigError, match="no method matches 'kivi'"):
        select(methods, ["exact/*", "kivi"])
