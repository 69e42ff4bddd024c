"""What a stored segment has, decoded."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from sgl_kvfetch.codec.container.encryption import NO_KEYS, StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.protect import open_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.sides import side_places
from sgl_kvfetch.codec.quant.base import Quantised, Quantiser
from sgl_kvfetch.codec.quant.registry import quantiser_from_identity
from sgl_kvfetch.types import SideKey


def cells_of(
    segment: CodedSegment,
    quantiser: Quantiser | None = None,
    *,
    keys: StoreKeys = NO_KEYS,
    variant: int = 0,
    num_levels: int | None = None,
) -> list[Quantised]:
    """Decode all cells. ``quantiser``: by default, what the identity gives."""
    manifest = open_manifest(decode_manifest(segment.manifest.encode()), keys)
    quantiser = quantiser or quantiser_from_identity(manifest.namespace.quantiser)
    reader, objects = SegmentReader(manifest, quantiser, variant, num_levels=num_levels), dict(segment.data_objects())
    data = [objects[name] for name in reader.object_names]
    return [reader.decode_cell(cell, reader.chunks_in(cell, data)) for cell in manifest.cells()]


def same(a: Iterable[Quantised], b: Iterable[Quantised]) -> bool:
    pairs = ((x, y) for one, other in zip(a, b, strict=True) for x, y in zip(one, other, strict=True))
    return all(torch.equal(x, y) for x, y in pairs)


def side_pages(segment: CodedSegment, keys: StoreKeys = NO_KEYS) -> dict[SideKey, bytes]:
    """Decode all side pages."""
    manifest, objects = open_manifest(decode_manifest(segment.manifest.encode()), keys), dict(segment.data_objects())
    return {
        key: bytes(place.decode(objects[place.data_name][place.start :][: place.size_bytes]))
        for key, place in side_places(manifest).items()
    }
