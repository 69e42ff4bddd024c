"""The variants that a segment should have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sgl_kvfetch.codec import CODECS, MAX_VARIANTS, RESOLUTIONS, Manifest, Variant, resolution_for
from sgl_kvfetch.errors import ConfigError


class Target(NamedTuple):
    """A codec and a resolution to encode a segment with."""

    codec: str
    resolution: str


def make_targets(codecs: Sequence[str], resolutions: Sequence[str]) -> tuple[Target, ...]:
    """Return each codec at each resolution, or once if it knows none. The first is the default of readers.

    Raises ConfigError."""
    for what, names, known in (("codec", codecs, list(CODECS)), ("resolution", resolutions, list(RESOLUTIONS))):
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
    """Return whether the wanted variants come first, in order. Others may follow only with ``keep_source``."""
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
