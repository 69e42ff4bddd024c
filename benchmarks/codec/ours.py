"""The methods of sgl_kvfetch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from benchmarks.codec.method import Method
from benchmarks.codec.segments import SegmentMethod
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.registry import make_quantiser

TARGET_KLS = (1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
_LEVELS = 3
QuantisedCell = tuple[CellPlace, CellValues, Quantised]


def _klt(target_kl: float | None, codec: str, label: str, profile: Profile) -> Method:
    """Return ``klt`` at a target, by default the profile's. ``label``: the codec's name in plots."""
    name = "klt" if target_kl is None else f"klt-{target_kl:g}"
    return SegmentMethod(f"{name}/{codec}", f"klt + {label} (ours)", KltQuantiser(profile, target_kl), codec)


def our_methods(profile: Profile | None) -> list[Method]:
    """Return our methods. ``klt`` needs a profile, which is not counted: one file a model. It uses its default target
    and the ``TARGET_KLS`` in its range."""
    methods: list[Method] = [
        SegmentMethod("exact/ans", "exact + rANS", make_quantiser("exact"), "ans"),
        SegmentMethod("exact/zstd", "exact + zstd", make_quantiser("exact"), "zstd"),
        SegmentMethod("uint8/zstd", "uint8 + zstd", make_quantiser("uint8"), "zstd"),
    ]
    if profile is not None:
        methods += [
            _klt(kl, codec, label, profile)
            for codec, label in (("ans", "rANS"), ("hevc", "HEVC"), ("zstd", "zstd"))
            for kl in in_range(profile, (None, *TARGET_KLS))
        ]
        methods += _levels(profile)
    return methods


def _levels(profile: Profile) -> Iterator[Method]:
    """Yield ``klt`` at its default step in levels, with only the first ones stored. For comparison, yield ``klt`` that
    is quantised at the larger steps of these levels."""
    step = profile.step_for(None)
    for kept in range(1, _LEVELS + 1):
        klt = KltQuantiser(profile, step=step)
        how = {"num_levels": _LEVELS, "kept_levels": kept}
        yield SegmentMethod(f"klt/levels-{kept}", "klt in levels (ours)", klt, "ans", **how)
        if kept < _LEVELS:
            unit = 3 ** (_LEVELS - kept)
            at_once = KltQuantiser(profile, step=step * unit)
            yield SegmentMethod(f"klt-step-{unit}/ans", "klt, larger steps (ours)", at_once, "ans")


def in_range(profile: Profile, target_kls: Iterable[float | None]) -> list[float | None]:
    """Return the targets that the profile reaches; None is its default."""
    lowest, highest = profile.curve[0].kl, profile.curve[-1].kl
    return [kl for kl in target_kls if kl is None or lowest <= kl <= highest]


def quantised_cells(values: CellValues, quantiser: KltQuantiser) -> Iterator[QuantisedCell]:
    """Yield the cells of a sequence's KV, from its first token on, contiguous, and their parts."""
    grid = quantiser.profile.grid
    for group, block in grid.cells():
        place = CellPlace(grid.layers(group), grid.heads(block), range(len(values.k)))
        cell = CellValues(*(x.contiguous() for x in values.cell(place.layers, place.heads)))
        yield place, cell, quantiser.quantise(cell, place)
