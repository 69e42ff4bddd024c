"""Decode profiles that KVFetcher published (arXiv 2602.09725, tables 1 to 3), as data.

Rows are concurrency 1, 2, ...; columns are 240p, 480p, 640p, 1080p; values are seconds per cell. The paper gives one
table of sizes for all GPUs.
"""

from __future__ import annotations

from sgl_kvfetch.plane.fetch.pool import DecodeProfile, VariantProfile

_RESOLUTIONS = ("240p", "480p", "640p", "1080p")
_SIZES_MB = (180, 205, 235, 256)
_SOURCE = "KVFetcher, arXiv 2602.09725, tables 1 to 3"

_H20 = (
    (0.21, 0.20, 0.20, 0.19),
    (0.22, 0.22, 0.21, 0.19),
    (0.29, 0.30, 0.29, 0.26),
    (0.32, 0.31, 0.30, 0.30),
    (0.46, 0.42, 0.37, 0.35),
    (0.52, 0.43, 0.41, 0.40),
    (0.62, 0.51, 0.45, 0.43),
)
_L20 = (
    (0.18, 0.175, 0.17, 0.16),
    (0.18, 0.178, 0.175, 0.16),
    (0.19, 0.183, 0.175, 0.161),
)
_A100 = (
    (0.25, 0.24, 0.231, 0.20),
    (0.252, 0.241, 0.235, 0.21),
    (0.252, 0.25, 0.24, 0.22),
    (0.26, 0.26, 0.25, 0.24),
    (0.29, 0.27, 0.27, 0.25),
)


def _profile(device: str, rows: tuple[tuple[float, ...], ...], switch_s: tuple[float, ...]) -> DecodeProfile:
    variants = tuple(
        VariantProfile(name=name, size_bytes=size * 1_000_000, decode_s=times, switch_s=switch)
        for name, size, times, switch in zip(_RESOLUTIONS, _SIZES_MB, zip(*rows, strict=True), switch_s, strict=True)
    )
    return DecodeProfile(device=device, source=_SOURCE, variants=variants)


PUBLISHED: dict[str, DecodeProfile] = {
    "H20": _profile("H20", _H20, (0.08, 0.06, 0.03, 0.0)),
    "L20": _profile("L20", _L20, (0.06, 0.06, 0.04, 0.0)),
    "A100": _profile("A100", _A100, (0.04, 0.04, 0.03, 0.0)),
}
