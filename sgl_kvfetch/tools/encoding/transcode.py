"""The variants that a segment should have, and how they are made of one that it has: without changing an integer or a
scale. Pure computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import msgspec

from sgl_kvfetch.codec import (
    CODECS,
    MAX_VARIANTS,
    READABLE,
    CodecName,
    CodedSegment,
    Manifest,
    Quantiser,
    SegmentReader,
    Variant,
    decode_cost,
    quantiser_from_identity,
    resolution_for,
)
from sgl_kvfetch.codec.container import CodedChunk, encode_cell, layouts_of, make_variant
from sgl_kvfetch.codec.layout import RESOLUTIONS, Layout
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError


class Target(NamedTuple):
    """A codec and a resolution to encode a segment with."""

    codec: str
    resolution: str


def make_targets(codecs: Sequence[str], resolutions: Sequence[str]) -> tuple[Target, ...]:
    """Return each codec at each resolution, or once if it knows none. The first is the default of readers.

    Raises ConfigError."""
    for what, names, known in (("codec", codecs, get_args(CodecName)), ("resolution", resolutions, list(RESOLUTIONS))):
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"{what}s are {', '.join(names) or 'none'}; expected at least one, and each once")
        for name in names:
            if name not in known:
                raise ConfigError(f"{what} {name!r} is unknown; known are {', '.join(known)}")
    pairs = ((codec, resolution) for codec in codecs for resolution in resolutions)
    targets = tuple(dict.fromkeys(Target(codec, resolution_for(codec, resolution)) for codec, resolution in pairs))
    if len(targets) > MAX_VARIANTS:
        raise ConfigError(f"{len(targets)} variants are wanted; a segment has at most {MAX_VARIANTS}")
    return targets


def find_variant(manifest: Manifest, target: Target) -> Variant | None:
    return next((v for v in manifest.variants if (v.codec, v.resolution) == target), None)


def is_done(manifest: Manifest, targets: Sequence[Target], keep_source: bool) -> bool:
    """Return whether the wanted variants come first, in order. Others may follow only with ``keep_source``. Nothing is
    made of a segment that has lost levels."""
    if manifest.num_dropped:
        return True
    found = [(v.codec, v.resolution) for v in manifest.variants]
    return found[: len(targets)] == list(targets) and (keep_source or len(found) == len(targets))


def with_variants(
    manifest: Manifest, targets: Sequence[Target], made: Manifest | None, keep_source: bool
) -> tuple[Variant, ...]:
    """Return the variants for the new manifest: wanted ones from ``made``, or else from ``manifest``, then others."""
    wanted = []
    for target in targets:
        variant = (made and find_variant(made, target)) or find_variant(manifest, target)
        assert variant is not None, target
        wanted.append(variant)
    others = [v for v in manifest.variants if (v.codec, v.resolution) not in targets]
    return tuple(wanted + others)[:MAX_VARIANTS] if keep_source else tuple(wanted)


def cheapest_variant(manifest: Manifest) -> int:
    """Return the index of the variant that is cheapest to decode. Raises FormatError if none can be decoded here."""
    readable = [i for i, v in enumerate(manifest.variants) if v.codecs <= READABLE]
    if not readable:
        found = sorted(set().union(*(v.codecs for v in manifest.variants)))
        raise FormatError(f"no variant can be decoded here: codecs are {', '.join(found)}, known {', '.join(CODECS)}")
    return min(
        readable,
        key=lambda i: (
            decode_cost(manifest.variants[i].codecs),
            sum(each.size_bytes for each in manifest.variants[i].objects),
        ),
    )


def transcode(
    manifest: Manifest,
    data: bytes,
    targets: Sequence[Target],
    source: int = 0,
    *,
    levels: Sequence[bytes] = (),
    before_cell: Callable[[], None] = lambda: None,
) -> CodedSegment:
    """Return the same segment with ``targets`` as its variants, without side pages. ``data`` is the data object of
    variant ``source``, ``levels`` those of its levels.

    Needs no profile. Verifies every checksum of the source; checksums of decoded values are the same in all variants.
    Memory use: the coded bytes and one decoded cell. ``before_cell`` may raise to abort. Raises
    CorruptError, FormatError, also if the source has lost levels, and UnsupportedError if a target does not suit the
    quantiser.
    """
    quantiser = quantiser_from_identity(manifest.namespace.quantiser)
    reader = SegmentReader(manifest, quantiser, source)
    if reader.levels_left_out:
        raise FormatError(f"{manifest.key.stem} has lost {reader.levels_left_out} levels: it is no source for others")
    ways = [(target.codec, target_layouts(manifest, quantiser, target.resolution)) for target in targets]
    # With short spans, several resolutions have the same layout. Encode it only once.
    coded: dict[int, list[CodedChunk]] = {ways.index(way): [] for way in ways}
    for cell in manifest.cells():
        before_cell()
        quantised = reader.decode_cell(cell, reader.cell_data(cell, (data, *levels)))
        for index, chunks in coded.items():
            codec, layouts = ways[index]
            chunks += encode_cell(manifest, cell, quantised, layouts, codec)
    made = [
        make_variant(coded[ways.index(way)], way[1], target.codec, target.resolution)
        for target, way in zip(targets, ways, strict=True)
    ]
    variants = tuple(variant for variant, _ in made)
    require_same_content(manifest, *variants)
    first, *more = (data for _, data in made)
    made_only = msgspec.structs.replace(manifest, variants=variants, sides=(), ciphers={})
    return CodedSegment(made_only, first, tuple(more))


def target_layouts(manifest: Manifest, quantiser: Quantiser, resolution: str) -> dict[str, Layout]:
    """Return the layouts for this resolution: those of an existing variant if there is one, else the default ones."""
    for variant in manifest.variants:
        if variant.resolution == resolution:
            return dict(variant.layouts)
    return layouts_of(manifest, quantiser, resolution)


def require_same_content(manifest: Manifest, *variants: Variant) -> None:
    """Raise CorruptError unless all variants list the same checksums of decoded values."""
    expected = manifest.variants[0].contents
    for variant in (*manifest.variants, *variants):
        if variant.contents != expected:
            raise CorruptError(f"variants of {manifest.key.stem} have different checksums of decoded values")


def verify_variant(
    manifest: Manifest,
    variant: int,
    data: bytes,
    *,
    levels: Sequence[bytes] = (),
    before_cell: Callable[[], None] = lambda: None,
) -> None:
    """Decode a variant's whole data object, and its levels'. Raises CorruptError or FormatError unless every checksum
    matches."""
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser), variant)
    objects = data, *levels
    for name, each, rows in zip(reader.object_names, objects, reader.variant.objects, strict=True):
        if len(each) != (expected := rows.size_bytes):
            raise CorruptError(f"{name} has {len(each)} bytes, expected {expected}")
    for cell in manifest.cells():
        before_cell()
        reader.decode_cell(cell, reader.cell_data(cell, objects))
