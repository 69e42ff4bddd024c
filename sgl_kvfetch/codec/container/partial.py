"""Manifests that name a part of what a stored manifest names, for whoever keeps only that part of its data.

Such a manifest has no signature of its own. It carries the stored one, `Manifest.encode` says how: that one's signature
is verified, and everything in the part must be in it.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError


def part_with(manifest: Manifest, names: Container[str]) -> Manifest | None:
    """Return a manifest of the data objects among ``names``: variants whose first level is there, each with the levels
    up to the first that is not, and no side pages. Return None if there is no variant."""
    here = []
    for variant in manifest.variants:
        is_there = [manifest.data_name(each) in names for each in variant.objects]
        if is_there[0]:
            here.append(variant.with_levels([*is_there, False].index(False) - 1))
    return msgspec.structs.replace(manifest, variants=tuple(here), sides=()) if here else None


def is_part(data: bytes, whole: bytes) -> bool:
    """Return whether a stored manifest is what `part_with` makes of another stored one."""
    try:
        part, manifest = decode_manifest(data), decode_manifest(whole)
    except FormatError:
        return False
    return part_with(manifest, part.data_names) == part
