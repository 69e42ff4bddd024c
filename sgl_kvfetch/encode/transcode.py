"""One segment from one variant to others, without touching an integer or a scale. Pure computation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from sgl_kvfetch.codecs import CODECS
from sgl_kvfetch.codecs.base import FrameEncoder
from sgl_kvfetch.container.manifest import Manifest, Variant
from sgl_kvfetch.container.segment import CodedChunk, CodedSegment, SegmentReader, encode_cell, make_variant
from sgl_kvfetch.encode.targets import Target
from sgl_kvfetch.errors import CorruptError, FormatError
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.layout.tiling import Tiling, layout_of
from sgl_kvfetch.quant import Quantiser, quantiser_from_identity
from sgl_kvfetch.types import TENSORS, TensorName

Layouts = dict[TensorName, FrameLayout]

# What decodes fast comes first.
_COST = {"zstd": 0, "deflate": 1, "hevc": 2, "hevc420": 3}


def cheapest_variant(manifest: Manifest) -> int:
    """The index of the variant that decodes with the least work. Raises FormatError if no codec here decodes any."""
    readable = [i for i, v in enumerate(manifest.variants) if v.codecs <= CODECS.keys()]
    if not readable:
        found = sorted(set().union(*(v.codecs for v in manifest.variants)))
        raise FormatError(f"no variant can be decoded here: codecs are {', '.join(found)}, known {', '.join(CODECS)}")
    return min(
        readable,
        key=lambda i: (
            max(_COST[codec] for codec in manifest.variants[i].codecs),
            manifest.data_bytes(manifest.variants[i]),
        ),
    )


def transcode(
    manifest: Manifest,
    data: bytes,
    targets: Sequence[Target],
    source: int = 0,
    *,
    before_cell: Callable[[], None] = lambda: None,
    encoders: Mapping[str, FrameEncoder] | None = None,
) -> CodedSegment:
    """The same segment with ``targets`` as its variants, coded from ``data``, the data object of variant ``source``.

    Needs no profile. Every checksum of the source is verified; those of what is decoded are the same in all variants.
    Holds the coded bytes and one cell. ``before_cell`` may raise, to give up. ``encoders``: of codecs that are encoded
    elsewhere than on the CPU. Raises CorruptError, FormatError.
    """
    quantiser = quantiser_from_identity(manifest.namespace.quantiser)
    reader = SegmentReader(manifest, quantiser, source)
    layouts = [target_layouts(manifest, quantiser, source, target.resolution) for target in targets]
    # Short spans give several resolutions the same pictures.
    ways = {_way(target, layout): (target.codec, layout) for target, layout in zip(targets, layouts, strict=True)}
    coded: dict[tuple[str, FrameLayout, FrameLayout], list[CodedChunk]] = {way: [] for way in ways}
    view = memoryview(data)
    for cell in manifest.cells():
        before_cell()
        quantised = reader.decode_cell(cell, view[slice(*reader.cell_range(cell))])
        for way, (codec, layout) in ways.items():
            coded[way] += encode_cell(quantised, layout[cell.tensor], codec, encoders)
    made = [
        make_variant(coded[_way(target, layout)], layout, target.codec, target.resolution)
        for target, layout in zip(targets, layouts, strict=True)
    ]
    variants = tuple(variant for variant, _ in made)
    require_same_content(manifest, *variants)
    first, *more = (data for _, data in made)
    return CodedSegment(msgspec.structs.replace(manifest, variants=variants), first, tuple(more))


def _way(target: Target, layouts: Layouts) -> tuple[str, FrameLayout, FrameLayout]:
    return target.codec, layouts["k"], layouts["v"]


def target_layouts(manifest: Manifest, quantiser: Quantiser, source: int, resolution: str) -> Layouts:
    """The writer's own way to lay out this segment, at another resolution.

    It knows more than we do (a profile, say), so what it chose is kept: the layouts of a variant of that resolution
    where there is one, else the source's tiling.
    """
    for variant in manifest.variants:
        if variant.resolution == resolution:
            return {tensor: variant.layout(tensor) for tensor in TENSORS}
    geometry, written = manifest.geometry, manifest.variants[source]
    span_tokens = manifest.span_tokens(0)

    def default(tensor: TensorName, resolution: str) -> FrameLayout:
        return quantiser.layout(tensor, geometry.num_heads, geometry.head_dim(tensor), span_tokens, resolution)

    layouts: Layouts = {}
    for tensor in TENSORS:
        own = written.layout(tensor)
        is_default = not written.resolution or own == default(tensor, written.resolution)
        layouts[tensor] = (
            default(tensor, resolution) if is_default else layout_of(_tiling(own), span_tokens, resolution)
        )
    return layouts


def _tiling(layout: FrameLayout) -> Tiling:
    return Tiling(
        head_rows=layout.head_rows,
        head_cols=layout.head_cols,
        dim_rows=layout.dim_rows,
        dim_cols=layout.dim_cols,
        token_rows=layout.token_rows,
        token_cols=layout.token_cols,
        inter_frame=layout.inter_frame,
    )


def require_same_content(manifest: Manifest, *variants: Variant) -> None:
    """Raises CorruptError unless these variants claim to decode to what the manifest's own ones do."""
    expected = [chunk.decoded_checksum for chunk in manifest.variants[0].chunks]
    for variant in (*manifest.variants, *variants):
        if [chunk.decoded_checksum for chunk in variant.chunks] != expected:
            raise CorruptError(f"variants of {manifest.key.stem} differ in what they decode to")


def verify_variant(
    manifest: Manifest, variant: int, data: bytes, *, before_cell: Callable[[], None] = lambda: None
) -> None:
    """Decode all of a variant's data object. Raises CorruptError, FormatError unless every checksum holds."""
    reader = SegmentReader(manifest, quantiser_from_identity(manifest.namespace.quantiser), variant)
    expected = manifest.data_bytes(reader.variant)
    if len(data) != expected:
        raise CorruptError(f"{reader.data_name} has {len(data)} bytes, expected {expected}")
    view = memoryview(data)
    for cell in manifest.cells():
        before_cell()
        reader.decode_cell(cell, view[slice(*reader.cell_range(cell))])
