"""The forms that sgl_kvfetch stores."""

from __future__ import annotations

from benchmarks.codec.method import Method
from benchmarks.codec.segments import SegmentMethod
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import Profile

TARGET_KLS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
_SOURCE = "sgl_kvfetch, docs/format.md"
_KLT_SOURCE = f"{_SOURCE}; the profile, one file a model, is not counted"


def our_methods(profile: Profile | None) -> list[Method]:
    """``klt`` needs a profile, and has the rates of ``TARGET_KLS`` that lie within what its calibration measured."""
    methods: list[Method] = [
        SegmentMethod("exact/hevc", _SOURCE, "exact + HEVC", make_quantiser("exact"), "hevc"),
        SegmentMethod("exact/zstd", _SOURCE, "exact + zstd", make_quantiser("exact"), "zstd"),
        SegmentMethod("uint8/zstd", _SOURCE, "uint8 + zstd", make_quantiser("uint8"), "zstd"),
    ]
    if profile is not None:
        lowest, highest = profile.curve[0].kl, profile.curve[-1].kl
        methods += [
            SegmentMethod(f"klt-{kl:g}/{codec}", _KLT_SOURCE, f"klt + {label} (ours)", KltQuantiser(profile, kl), codec)
            for codec, label in (("hevc", "HEVC"), ("zstd", "zstd"))
            for kl in TARGET_KLS
            if lowest <= kl <= highest
        ]
    return methods
