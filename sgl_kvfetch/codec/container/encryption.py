"""Encrypt data objects, so that whoever holds the bytes can neither read nor replace them.

Each data object has a key of its own, derived from a key that the servers share, from 32 random bytes and from the
object's place: the pages, heads and cells that it is for. AES-256-GCM encrypts its chunks, each with its number as the
nonce. So no nonce repeats under a key, and a chunk decrypts nowhere but in its place. See docs/format.md.
"""

from __future__ import annotations

import hashlib
import re
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
_ID_CONTEXT = b"sgl_kvfetch key\0"
ID_DIGITS = 16
_KEY = re.compile(rf"[0-9a-fA-F]{{{2 * _KEY_BYTES}}}")

KeyId = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{ID_DIGITS}}}\Z")]


class Encryption(msgspec.Struct, frozen=True):
    """How a data object is encrypted. ``key``: the id of the shared key. ``salt``: the random bytes from which the
    object's own key is derived. ``table``: the encrypted `objects.Table`: what the chunks' rows hide."""

    key: KeyId
    salt: Annotated[bytes, Meta(min_length=SALT_BYTES, max_length=SALT_BYTES)]
    table: bytes


class DataCipher:
    """Encrypts and decrypts the chunks of one data object."""

    def __init__(self, key_id: str, key: bytes, salt: bytes, place: bytes) -> None:
        # Commands and stores without a key start sooner without these.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        self._key_id = key_id
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
                f"{what} does not decrypt with the key {self._key_id}: it was altered, or belongs elsewhere"
            ) from e


class StoreKeys:
    """Keys that servers which trust each other share, the newest first, or none. The newest encrypts; all decrypt. With
    keys, only what is encrypted with one of them counts."""

    def __init__(self, *keys: bytes) -> None:
        self._keys = {_id_of(key): key for key in keys}

    @classmethod
    def read(cls, path: str | Path | None) -> StoreKeys:
        """Read a file with a key on each line, as 64 hex digits, such as ``openssl rand -hex 32`` prints. Return no
        keys without a file. Raises ConfigError."""
        if path is None:
            return NO_KEYS
        lines = read_secret_lines(path, "key file")
        if not lines:
            raise ConfigError(f"key file {path} is empty; expected a key on each line, from: openssl rand -hex 32")
        for number, line in enumerate(lines, 1):
            if not _KEY.fullmatch(line):
                raise ConfigError(
                    f"key file {path}: key {number} has {len(line)} characters; expected 64 hex digits on each line, "
                    "from: openssl rand -hex 32"
                )
        return cls(*map(bytes.fromhex, lines))

    @property
    def ids(self) -> list[str]:
        """What names the keys in manifests and messages, the newest first. Ids say nothing of the keys."""
        return list(self._keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def __contains__(self, key_id: str) -> bool:
        return key_id in self._keys

    def cipher(self, key_id: str, salt: bytes, place: bytes) -> DataCipher:
        """Return the cipher of the data object with this salt and place. Raises KeyError for an id without a key."""
        return DataCipher(key_id, self._keys[key_id], salt, place)


def _id_of(key: bytes) -> str:
    """Return the first 16 hex digits of a SHA-256 over a key."""
    return hashlib.sha256(_ID_CONTEXT + key).hexdigest()[:ID_DIGITS]


NO_KEYS = StoreKeys()
