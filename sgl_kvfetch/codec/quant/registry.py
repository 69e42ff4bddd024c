"""Quantisers by name, and by the identity that is a part of the namespace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from sgl_kvfetch.codec.quant import PlainQuantiserName, QuantiserName
from sgl_kvfetch.codec.quant.base import ExactQuantiser, Quantiser
from sgl_kvfetch.codec.quant.klt import KLT_IDENTITY, KltIntegers
from sgl_kvfetch.codec.quant.symmetric import SymmetricQuantiser
from sgl_kvfetch.errors import ConfigError, FormatError

# CacheGen's own values (LMCache's CacheGenConfig for 32-layer models): finer bins for early layers.
CACHEGEN_K_BINS = (32,) * 10 + (16,)
CACHEGEN_V_BINS = (32,) * 2 + (16,)

_BINS = r"[0-9]{1,3}(?:,[0-9]{1,3})*"
_CACHEGEN = re.compile(rf"cachegen\(k=({_BINS});v=({_BINS})\)")


def make_quantiser(
    name: PlainQuantiserName,
    k_bins: Sequence[int] | None = None,
    v_bins: Sequence[int] | None = None,
) -> Quantiser:
    """Create a quantiser that needs no profile. Only ``cachegen`` uses the bins.

    Raises ConfigError for bins that are not allowed.
    """
    match name:
        case "exact":
            return ExactQuantiser()
        case "uint8":
            return SymmetricQuantiser("uint8", "head", (256,), (256,))
        case "cachegen":
            return SymmetricQuantiser("cachegen", "layer", k_bins or CACHEGEN_K_BINS, v_bins or CACHEGEN_V_BINS)


def quantiser_from_identity(identity: str) -> Quantiser:
    """Create the quantiser with this ``Quantiser.identity``, as recorded in a stored namespace.

    For ``klt``, whose profile is not stored, it can handle integers but not values. Raises FormatError.
    """
    plain: tuple[Literal["exact", "uint8"], ...] = ("exact", "uint8")
    for name in plain:
        if (quantiser := make_quantiser(name)).identity == identity:
            return quantiser
    if match := _CACHEGEN.fullmatch(identity):
        k_bins, v_bins = ([int(bins) for bins in group.split(",")] for group in match.groups())
        try:
            return make_quantiser("cachegen", k_bins, v_bins)
        except ConfigError as e:
            raise FormatError(f"quantiser {identity[:120]!r} is not valid: {e}") from e
    if KLT_IDENTITY.fullmatch(identity):
        return KltIntegers(identity)
    raise FormatError(f"quantiser {identity[:120]!r} is unknown; known are {', '.join(get_args(QuantiserName))}")
