"""Sign manifests, so that neither a store nor the holder of a token can make readers take other values.

A signed manifest is a manifest with ``"KVFS"`` and a HMAC-SHA256 behind it. Its data objects have chunk digests: the
other checksums find damage, but an attacker can make other bytes with the same checksums. See docs/format.md.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.user_files import read_secret_lines

_MAGIC = b"KVFS"
_CONTEXT = b"sgl_kvfetch manifest\0"
TRAILER_BYTES = len(_MAGIC) + 32
CHUNK_DIGEST_BYTES = 16
_LEAST_KEY_CHARS = 32


def chunk_digest(bitstream: bytes | memoryview) -> bytes:
    """Return the first 16 bytes of the SHA-256 of a chunk's bitstream."""
    return hashlib.sha256(bitstream).digest()[:CHUNK_DIGEST_BYTES]


def split_trailer(data: bytes, manifest_bytes: int) -> tuple[bytes, bytes]:
    """Split a stored manifest into itself, of ``manifest_bytes``, and its signature; b"" if it has none."""
    is_signed = len(data) == manifest_bytes + TRAILER_BYTES and data[manifest_bytes:].startswith(_MAGIC)
    return (data[:manifest_bytes], data[manifest_bytes + len(_MAGIC) :]) if is_signed else (data, b"")


class ManifestKeys:
    """Keys that servers which trust each other share. The first one signs; all are accepted."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        assert keys
        self._keys = keys

    @property
    def fingerprint(self) -> bytes:
        """What tells these keys from others, and says nothing of them."""
        return hashlib.sha256(b"\0".join(self._keys)).digest()

    def sign(self, manifest: bytes) -> bytes:
        """Return an unsigned manifest with its signature."""
        return manifest + _MAGIC + _signature(manifest, self._keys[0])

    def is_signed(self, manifest: bytes, signature: bytes) -> bool:
        """Return whether one of the keys gives ``manifest`` this signature."""
        return any(hmac.compare_digest(_signature(manifest, key), signature) for key in self._keys)


def _signature(manifest: bytes, key: bytes) -> bytes:
    return hmac.digest(key, _CONTEXT + manifest, "sha256")


def read_manifest_keys(path: str | Path | None) -> ManifestKeys | None:
    """Read a file with a key on each line, such as ``openssl rand -hex 32`` prints. Return None without a file.

    Raises ConfigError if it cannot be read, has no key, or has one that is not 32 or more printable ASCII characters.
    """
    if path is None:
        return None
    keys = [line.encode() for line in read_secret_lines(path, "manifest key file")]
    if not keys or min(map(len, keys)) < _LEAST_KEY_CHARS:
        raise ConfigError(
            f"manifest key file {path}: expected keys of {_LEAST_KEY_CHARS} or more characters, one a line"
        )
    return ManifestKeys(keys)
