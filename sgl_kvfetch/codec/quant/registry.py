"""Quantisers by name.

Installed packages bring further ones: an entry point in the group ``sgl_kvfetch.quantisers`` is called with an identity
and returns a `Quantiser` (docs/extending.md). An identity is the entry point's name, or that with parameters in
parentheses. It is a part of the namespace, so segments of other parameters are never taken for these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, get_args

from sgl_kvfetch.codec.quant.base import ExactQuantiser, Quantiser
from sgl_kvfetch.codec.quant.klt import KLT_IDENTITY, KltIntegers
from sgl_kvfetch.codec.quant.symmetric import SymmetricQuantiser
from sgl_kvfetch.doors import brought_by_others, label_of, load_brought, require_made
from sgl_kvfetch.errors import ConfigError, FormatError

PlainQuantiserName = Literal["exact", "uint8", "cachegen"]  # those that need no profile
QuantiserName = Literal[PlainQuantiserName, "klt"]

# CacheGen's own values (LMCache's CacheGenConfig for 32-layer models): finer bins for early layers.
CACHEGEN_K_BINS = (32,) * 10 + (16,)
CACHEGEN_V_BINS = (32,) * 2 + (16,)

_BINS = r"[0-9]{1,3}(?:,[0-9]{1,3})*"
_MOST_IDENTITY = 200  # characters of another's
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
    if not is_brought(identity):
        known = ", ".join((*get_args(QuantiserName), *brought_by_others("quantisers")))
        raise FormatError(f"quantiser {identity[:120]!r} is unknown; known are {known}")
    try:
        made = make_brought(identity)
    except ConfigError as e:
        raise FormatError(str(e)) from e
    if made.identity != identity:
        label = label_of("quantisers", identity.partition("(")[0])
        raise FormatError(f"{label}: asked for {identity[:120]!r}, it made {made.identity!r}")
    return made


def is_brought(identity: str) -> bool:
    """Return whether an installed package brings the quantiser of this identity, or of this name."""
    name = identity.partition("(")[0]
    return name in brought_by_others("quantisers") and name not in get_args(QuantiserName)


def make_brought(identity: str) -> Quantiser:
    """Create a quantiser that another package brings, from its identity, or its name for the default parameters.
    Raises ConfigError, which says what is wrong with it."""
    name = identity.partition("(")[0]
    make = load_brought("quantisers", name)
    try:
        made = make(identity)
    except (TypeError, ValueError) as e:
        raise ConfigError(f"{label_of('quantisers', name)}: {e}; it was called with {identity[:120]!r}") from e
    require_made("quantisers", name, made, Quantiser)
    assert isinstance(made, Quantiser)
    found = getattr(made, "identity", "")
    if re.fullmatch(rf"{re.escape(name)}(\([^()]*\))?", found) is None or len(found) > _MOST_IDENTITY:
        raise ConfigError(
            f"{label_of('quantisers', name)}: expected an identity {name} or {name}(PARAMETERS), of at most "
            f"{_MOST_IDENTITY} characters, found {found[:120]!r}: namespaces are told apart by it"
        )
    return made
