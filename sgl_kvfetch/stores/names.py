"""Check names that come from outside, where an invalid one is a failed request."""

from __future__ import annotations

import re

from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import NAMESPACE_PATTERN, ObjectName, parse_object_name

_NAMESPACE = re.compile(NAMESPACE_PATTERN)


def require_name(name: str) -> ObjectName:
    """Parse an object's name. Raises StoreError (``invalid``) for any other text."""
    try:
        return parse_object_name(name)
    except FormatError as e:
        raise StoreError("invalid", str(e)) from e


def is_namespace(name: str) -> bool:
    """Return whether this is the name of a namespace's folder."""
    return _NAMESPACE.fullmatch(name) is not None


def require_namespace(namespace: str) -> None:
    """Raise StoreError (``invalid``) unless ``namespace`` is the name of a namespace's folder."""
    if not is_namespace(namespace):
        raise StoreError("invalid", f"not a namespace: {namespace[:120]!r}")
