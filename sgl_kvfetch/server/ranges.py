"""The Range header."""

from __future__ import annotations

import re

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class RangeError(Exception):
    """The range cannot be satisfied, or is none."""


def parse_range(header: str, size_bytes: int) -> tuple[int, int]:
    """Bytes ``[start, end)`` that one range of an object of ``size_bytes`` asks for. Raises RangeError.

    Stricter than RFC 9110, which would have malformed and multiple ranges ignored: our clients send neither, and a
    whole object is a large answer to a mistake.
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
