"""Manifests that name a part of what a stored manifest names, for whoever keeps only that part of its data: a cache on
a disk, and a store that drops levels to make room.

Neither has the key that signs. So such a manifest has no signature of its own. It carries the signed one
(`Manifest.encode`). A reader verifies the signature of that one, and checks that it has everything that the part has. A
store can always take data away. Here readers see how many levels a part lacks, and refuse too many.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from sgl_kvfetch.codec.container.encryption import ManifestKeys
from sgl_kvfetch.codec.container.manifest import (
    MAX_MANIFEST_BYTES,
    Manifest,
    decode_manifest,
    require_rewritable,
    split_signature,
    whole_of,
)
from sgl_kvfetch.errors import FormatError

_HEAD_BYTES = 128  # that a manifest takes to carry another, and its own signature


def part_with(manifest: Manifest, names: Container[str]) -> Manifest | None:
    """Return a manifest of the data objects among ``names``: variants whose first level is there, each with the levels
    up to the first that is not, and no side pages. Return None if there is no variant."""
    here = []
    for variant in manifest.variants:
        is_there = [manifest.data_name(each) in names for each in variant.objects]
        if is_there[0]:
            here.append(variant.with_levels([*is_there, False].index(False) - 1))
    return msgspec.structs.replace(manifest, variants=tuple(here), sides=()) if here else None


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


def signed_by(content: bytes) -> bytes:
    """Return the signed manifest that vouches for a stored one: itself, or the one that it carries. b"" if there is
    none. Verifies nothing."""
    manifest, signature = split_signature(content)
    whole = content if signature else whole_of(manifest)
    return whole if split_signature(whole)[1] else b""


def is_vouched_for(content: bytes, keys: ManifestKeys, is_cached: bool = False) -> bool:
    """Return whether one of ``keys`` has signed a stored manifest, or the one that it is a part of.

    A store may leave out the last levels, which `Manifest.num_dropped` shows to readers. A cache of this machine
    (``is_cached``) may leave out any object.
    """
    signed = signed_by(content)
    if not signed or not keys.is_signed(*split_signature(signed)):
        return False
    if signed == content:
        return True
    try:
        part, whole = decode_manifest(content), decode_manifest(signed)
    except FormatError:
        return False
    if is_cached and part_with(whole, part.data_names) == part:
        return True
    num_dropped = part.num_dropped - whole.num_dropped
    return num_dropped > 0 and coarser_by(whole, num_dropped) == part


def num_droppable(manifest: Manifest, content: bytes) -> int:
    """Return how many levels a store may drop from a stored segment, one after the other.

    The coarser manifest carries a signed one. Return 0 if both together are too large, or if the signed one takes more
    bytes than dropping the last level frees.
    """
    num_levels = max((len(each.levels) for each in manifest.variants), default=0)
    if not num_levels or signed_by(content) != content:
        return num_levels
    freed_bytes = sum(manifest.data_sizes.values()) - sum(coarser_by(manifest, 1).data_sizes.values())
    added_bytes = len(content) + _HEAD_BYTES
    return num_levels if len(content) + added_bytes <= MAX_MANIFEST_BYTES and added_bytes < freed_bytes else 0


def without_last_level(manifest: Manifest, content: bytes) -> tuple[bytes, dict[str, int]] | None:
    """Return a stored manifest's bytes without its last level, and the sizes, by name, of the data objects that it then
    no longer needs. Return None if it may not lose the level. Raises FormatVersionError."""
    if not num_droppable(manifest, content):
        return None
    require_rewritable(content)
    coarser = coarser_by(manifest, 1)
    unnamed = {name: size for name, size in manifest.data_sizes.items() if name not in coarser.data_names}
    return coarser.encode(signed_by(content)), unnamed
