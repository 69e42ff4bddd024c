"""Manifests that name a part of what a stored manifest names, for a store that drops levels to make room.

It needs no key. A store can always take data away. Readers see how many levels a part lacks, and refuse too many;
an encrypted object decrypts only if that number is right (`protect`).
"""

from __future__ import annotations

import msgspec

from sgl_kvfetch.codec.container.manifest import Manifest, require_rewritable


def coarser_by(manifest: Manifest, num_levels: int) -> Manifest:
    """Return a segment's manifest without its last ``num_levels`` levels.

    All variants hold the same values. So each loses as many levels. A variant that has fewer is left out: it would stay
    finer than the others.
    """
    if not num_levels:
        return manifest
    kept = [each for each in manifest.variants if len(each.levels) >= num_levels]
    coarser = (each.with_levels(len(each.levels) - num_levels) for each in kept)
    return msgspec.structs.replace(manifest, variants=tuple(coarser))


def num_droppable(manifest: Manifest) -> int:
    """Return how many levels a store may drop from a segment, one after the other."""
    return max((len(each.levels) for each in manifest.variants), default=0)


def without_last_level(manifest: Manifest, content: bytes) -> tuple[bytes, dict[str, int]] | None:
    """Return a stored manifest's bytes without its last level, and the sizes, by name, of the data objects that it then
    no longer needs. Return None if it has none. Raises FormatVersionError."""
    if not num_droppable(manifest):
        return None
    require_rewritable(content)
    coarser = coarser_by(manifest, 1)
    unnamed = {name: size for name, size in manifest.data_sizes.items() if name not in coarser.data_names}
    return coarser.encode(), unnamed
