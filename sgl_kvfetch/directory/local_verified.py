"""Keep the last result of `kvfetch verify` in a file beside the segments. Blocking. All may raise OSError."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

import msgspec

from sgl_kvfetch.stores import MAX_VERIFIED_BYTES, Verified, decode_verified

_NAME = ".verified.json"  # no namespace is called like this


def read_verified(root: Path) -> Verified | None:
    """Return the last result; None if there is none. Raises FormatError."""
    try:
        with (root / _NAME).open("rb") as file:
            return decode_verified(file.read(MAX_VERIFIED_BYTES + 1))
    except FileNotFoundError:
        return None


def write_verified(root: Path, found: Verified) -> None:
    """Replace the last result atomically, as one of now."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = msgspec.structs.replace(found, at_s=time.time()).encode()
    temp = root / f"{_NAME}.{secrets.token_hex(4)}"
    with os.fdopen(os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600), "wb") as file:
        file.write(content)
    os.replace(temp, root / _NAME)
