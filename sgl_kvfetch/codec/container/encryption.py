"""Encrypt data objects, and sign manifests, so that whoever holds the bytes can neither read nor replace them.

Each data object has a key of its own, derived from a key that the servers share, from 32 random bytes and from the
object's place: the pages, heads and cells that it is for. AES-256-GCM encrypts its chunks, each with its number as the
nonce. So no nonce repeats under a key, and a chunk decrypts nowhere but in its place. See docs/format.md.

A signed manifest is a manifest with ``"KVFS"`` and a HMAC-SHA256 behind it. Its data objects have chunk digests: the
other checksums find damage, but an attacker can make other bytes with the same checksums. See docs/format.md.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.errors import ConfigError, CorruptError
from sgl_kvfetch.user_files import read_secret_lines

ENCRYPTED = "aes-256-gcm"  # stands in place of an encrypted chunk's codec
SALT_BYTES = 32
TAG_BYTES = 16  # by which what AES-GCM has encrypted is longer than its content
TABLE_NONCE = (1 << 96) - 1  # of the encrypted table; the chunks' nonces count from 0
_KEY_BYTES = 32
_NONCE_BYTES = 12
_DATA_CONTEXT = b"sgl_kvfetch data\0"
_LINE = re.compile(r"([A-Za-z0-9._-]{1,64})\s+([0-9a-fA-F]{64})")


class Encryption(msgspec.Struct, frozen=True):
    """How a data object is encrypted. ``key``: the name of the shared key. ``salt``: the random bytes from which the
    object's own key is derived. ``table``: the encrypted `objects.Table`, with what the chunks' rows hide."""

    key: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,64}\Z")]
    salt: Annotated[bytes, Meta(min_length=SALT_BYTES, max_length=SALT_BYTES)]
    table: bytes


class DataCipher:
    """Encrypts and decrypts the chunks of one data object."""

    def __init__(self, key_name: str, key: bytes, salt: bytes, place: bytes) -> None:
        # Commands and stores without a key start sooner without these.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._key_name = key_name
        self._aes = AESGCM(HKDF(SHA256(), _KEY_BYTES, salt, _DATA_CONTEXT + place).derive(key))

    def encrypt(self, number: int, content: bytes | memoryview) -> bytes:
        """Return chunk ``number``, encrypted. Never call this twice with one number: it is the nonce."""
        return self._aes.encrypt(number.to_bytes(_NONCE_BYTES), content, None)

    def decrypt(self, number: int, content: bytes | memoryview, what: str) -> bytes:
        """Return the content of chunk ``number``. Raises CorruptError."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aes.decrypt(number.to_bytes(_NONCE_BYTES), content, None)
        except InvalidTag as e:
            raise CorruptError(
                f"{what} does not decrypt with the key {self._key_name!r}: it was altered, belongs elsewhere, or "
                "another key has this name"
            ) from e


class EncryptionKeys:
    """Keys by name that servers which trust each other share. The first one encrypts; all decrypt."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        assert keys
        self._keys = keys
        self.first = next(iter(keys))  # the name of the key that encrypts

    @property
    def fingerprint(self) -> bytes:
        """What tells these keys from others, and says nothing of them."""
        return hashlib.sha256(b"".join(name.encode() + b"\0" + key for name, key in self._keys.items())).digest()

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def cipher(self, name: str, salt: bytes, place: bytes) -> DataCipher:
        """Return the cipher of the data object with this salt and place. Raises KeyError for a name without a key."""
        return DataCipher(name, self._keys[name], salt, place)


def read_encryption_keys(path: str | Path | None) -> EncryptionKeys | None:
    """Read a file with a name and a key on each line, the key as 64 hex digits, such as ``openssl rand -hex 32``
    prints. Return None without a file. Raises ConfigError."""
    if path is None:
        return None
    lines = read_secret_lines(path, "encryption key file")
    found = [_LINE.fullmatch(line) for line in lines]
    keys = {match[1]: bytes.fromhex(match[2]) for match in found if match}
    if not keys or len(keys) < len(lines):
        raise ConfigError(
            f"encryption key file {path}: expected a name and 64 hex digits on each line, and each name once"
        )
    return EncryptionKeys(keys)


_MAGIC = b"KVFS"
_SIGNED_CONTEXT = b"sgl_kvfetch manifest\0"
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
    return hmac.digest(key, _SIGNED_CONTEXT + manifest, "sha256")


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


@dataclass(frozen=True, slots=True)
class StoreKeys:
    """Keys that the servers of a store share. With keys of a kind, what is written is signed, or encrypted, with the
    first of them, and only what is signed, or encrypted, with one of them counts."""

    manifest: ManifestKeys | None = None
    encryption: EncryptionKeys | None = None

    @classmethod
    def read(cls, manifest_key_file: str | Path | None, encryption_key_file: str | Path | None) -> StoreKeys:
        """Read the files that there are. Raises ConfigError."""
        return cls(read_manifest_keys(manifest_key_file), read_encryption_keys(encryption_key_file))

    def __bool__(self) -> bool:
        return self.manifest is not None or self.encryption is not None

    @property
    def fingerprint(self) -> bytes:
        """What tells these keys from others, and says nothing of them."""
        every = (b"" if keys is None else keys.fingerprint for keys in (self.manifest, self.encryption))
        return b"".join(hashlib.sha256(each).digest() for each in every)


NO_KEYS = StoreKeys()
