"""Parse the Range header."""

from __future__ import annotations

import re

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class RangeError(Exception):
    """The range is malformed or cannot be satisfied."""


def parse_range(header: str, size_bytes: int) -> tuple[int, int]:
    """Return the bytes ``[start, end)`` that the header requests of an object of ``size_bytes``. Raises RangeError.

    RFC 9110 would ignore malformed and multiple ranges, and send the whole object: a large answer to a mistake. Our
    clients send neither, so both are errors.
    """
    match = _RANGE.fullmatch(header.strip())
    if match is None or match[1] == match[2] == "":
        raise RangeError(f"malformed range {header[:80]!r}; expected one range, as in bytes=0-99")
    if match[1] == "":
        start, end = max(0, size_bytes - int(match[2])), size_bytes
    else:
        start = int(match[1])
        end = min(int(match[2]) + 1, size_bytes) if match[2] else size_bytes
        if match[2] and int(match[2]) < start:
            raise RangeError(f"range {header[:80]!r} ends before it starts")
    if start >= end:
        raise RangeError(f"range {header[:80]!r} lies outside the object's {size_bytes} bytes")
    return start, end
