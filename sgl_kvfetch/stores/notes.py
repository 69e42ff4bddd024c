"""Notes: what a store keeps beside its segments. There are two kinds: pins and profiles. They are neither evicted nor
listed with segments. A store keeps their bytes under names (`NoteKind`).

**Pins** are prompts whose segments are evicted last. A pin has the hashes of a prompt's pages. It holds for every
segment with one of these pages: of any namespace and rank, stored before or after it.

**Profiles** say what ``klt`` knows of a model; they are found by the fingerprint of its weights. A store holds profiles
under the names ``WEIGHTS/DIGEST``: the fingerprint of the weights and the profile's own digest. Of several profiles of
one model, the newest counts: the one that was put last, by the store's clock. To withdraw a profile is to delete it.

What is stored is the profile's file behind a header, which has its SHA-256. Where servers have keys, the
file is encrypted. So a reader knows from the first 4 KiB whether it wants a profile,
and after reading the rest whether it is the one that was published. docs/format.md has the bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sgl_kvfetch.codec import TAG_BYTES, StoreKeys, decode_manifest
from sgl_kvfetch.codec.container.encryption import SALT_BYTES, KeyId
from sgl_kvfetch.errors import (
    DECODE_ERRORS,
    ConfigError,
    CorruptError,
    FormatError,
    FormatVersionError,
    StoreError,
    why,
)
from sgl_kvfetch.keys import MAX_LABEL_CHARS, PAGE_HASH_BYTES, SegmentKey, split_hashes
from sgl_kvfetch.side_by_side import together
from sgl_kvfetch.stores.base import AdminStore, ObjectInfo


@dataclass(frozen=True, slots=True)
class NoteKind:
    """A kind of note: which names and sizes it has, and what a store may look at."""

    name: str  # of its folder, in a store and over HTTP
    one: str  # for messages
    names: re.Pattern[str]  # safe as paths
    max_bytes: int
    max_notes: int  # in a store
    checked_bytes: int  # of the first bytes, which `check` takes
    check: Callable[[str, bytes, int], object]  # name, first bytes, size: raises FormatError for anything else
    max_part: float | None = None  # of a capacity: a note that needs more is refused
    max_beside: int | None = None  # with the same name before the slash

    def has_name(self, name: str) -> bool:
        return self.names.fullmatch(name) is not None

    def require(self, name: str, length: int | None = None) -> str:
        """Return the name, which then is also safe as a path. Raises StoreError: ``invalid`` for any other text,
        ``too_large`` unless so many bytes of such a note may be read."""
        if not self.has_name(name):
            raise StoreError("invalid", f"not the name of a {self.one}: {name[:120]!r}")
        if length is not None and not 0 < length <= self.max_bytes:
            raise StoreError("too_large", f"{self.one} {name}: {length} bytes, expected 1 to {self.max_bytes}")
        return name

    def require_list(self, what: str, infos: Sequence[ObjectInfo]) -> Sequence[ObjectInfo]:
        """Return what a store answered to a listing of its notes. Raises StoreError (``protocol``) for others."""
        if len(infos) > self.max_notes or not all(self.has_name(info.name) for info in infos):
            raise StoreError("protocol", f"{what}: expected up to {self.max_notes} names of a {self.one}, found others")
        return infos


MAX_LABEL = 200  # characters
MAX_PIN_PAGES = 1 << 16
MAX_PIN_BYTES = MAX_PIN_PAGES * PAGE_HASH_BYTES + 4096
MAX_PINNED_PART = 1 / 2  # of a capacity: a pin that needs more is refused


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    label: Annotated[str, Meta(max_length=MAX_LABEL)]  # for people
    page_size: Annotated[int, Meta(ge=1)]  # in tokens
    hashes: Annotated[bytes, Meta(min_length=PAGE_HASH_BYTES, max_length=MAX_PIN_PAGES * PAGE_HASH_BYTES)]

    @property
    def name(self) -> str:
        """The hash of the last page, which stands for the whole prompt."""
        return self.hashes[-PAGE_HASH_BYTES:].hex()

    @property
    def page_hashes(self) -> list[bytes]:
        return split_hashes(self.hashes)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


_pins = msgspec.msgpack.Decoder(Pin)  # made before there are threads: see `codec/container/manifest.py`


def decode_pin(content: bytes) -> Pin:
    """Decode a stored pin. Raises FormatError."""
    try:
        pin = _pins.decode(content)
    except DECODE_ERRORS as e:
        raise FormatError(f"malformed pin: {e}") from e
    if len(pin.hashes) % PAGE_HASH_BYTES:
        raise FormatError(f"malformed pin: {len(pin.hashes)} bytes of page hashes are no multiple of {PAGE_HASH_BYTES}")
    return pin


def _check_pin(name: str, data: bytes, size_bytes: int) -> None:
    pin = decode_pin(data)
    if pin.name != name:
        raise FormatError(f"it belongs under the name {pin.name}")


PINS = NoteKind(
    "pins",
    "pin",
    re.compile(r"[0-9a-f]{64}"),
    max_bytes=MAX_PIN_BYTES,
    max_notes=1 << 16,
    checked_bytes=MAX_PIN_BYTES,
    check=_check_pin,
)


async def get_pin(store: AdminStore, name: str) -> Pin | None:
    """Return a pin, or None if there is none of this name. Raises StoreError."""
    content = await store.get_note(PINS, name)
    try:
        return None if content is None else decode_pin(content)
    except FormatError as e:
        raise StoreError("protocol", f"the store's pin {name}: {e}") from e


async def put_pin(store: AdminStore, pin: Pin) -> None:
    """Keep a pin. Raises StoreError: ``full`` if pinned segments would take more than half of the capacity."""
    await store.put_note(PINS, pin.name, pin.encode())


async def pinned_segments(store: AdminStore, keys: Collection[SegmentKey]) -> set[SegmentKey]:
    """Return the segments that lookups of pins find, and those that end with a page of one. Raises StoreError."""
    found, pages = set[SegmentKey](), set[bytes]()
    for info in await store.notes(PINS):
        pin = await get_pin(store, info.name)
        if pin is None:
            continue  # deleted meanwhile
        pages.update(pin.page_hashes)
        for folder in {key.namespace for key in keys}:
            hits = (await store.lookup(folder, pin.page_hashes)).hits
            found.update(decode_manifest(hit.manifest).key for hit in hits)
    return found.union(key for key in keys if key.last_page_hash in pages)  # lookups stop at gaps


MAX_PROFILE_BYTES = 1 << 30  # with its header; of 405 billion weights it has about 1 GB
_MAX_PROFILES = 1024
MAX_HEAD_BYTES = 4096  # the header, with what stands before it
VERSION = 1

_MAGIC = b"KVFP"
_HEAD = struct.Struct("<4sI")
_READS_AT_ONCE = 8

_Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Positive = Annotated[float, Meta(gt=0)]


class _Encryption(msgspec.Struct, frozen=True):
    key: KeyId
    salt: Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * SALT_BYTES}}}\Z")]


class ProfileHeader(msgspec.Struct, frozen=True):
    """What stands before a stored profile."""

    version: int
    weights: _Digest
    digest: _Digest  # `Profile.digest`
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]  # of the profile's file
    num_bytes: Annotated[int, Meta(ge=1, le=MAX_PROFILE_BYTES)]  # of the profile's file
    model: Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]  # for people
    target_kl: _Positive  # the profile's default, for people
    encryption: _Encryption | None = None


class _Version(msgspec.Struct, frozen=True):
    version: int


@dataclass(frozen=True, slots=True)
class ProfileHead:
    header: ProfileHeader
    num_bytes: int  # the header, with what stands before it

    def require_trusted(self, keys: StoreKeys) -> None:
        """Raise FormatError unless it is encrypted with one of ``keys``, if there are any."""
        encryption = self.header.encryption
        if encryption is None and keys:
            raise FormatError("it is not encrypted, and there is a key_file")
        if encryption is not None and keys and encryption.key not in keys:
            raise FormatError(f"it is encrypted with the key {encryption.key}, expected one of {', '.join(keys.ids)}")

    def require_readable(self, keys: StoreKeys) -> None:
        """Raise FormatError unless it is to be trusted and can be decrypted."""
        self.require_trusted(keys)
        if self.header.encryption is not None and not keys:
            raise FormatError(f"it is encrypted with the key {self.header.encryption.key}, and there is no key_file")


@dataclass(frozen=True, slots=True)
class ListedProfile:
    """A profile of a store's list. ``head``: None if it cannot be used, and ``problem`` says why."""

    info: ObjectInfo
    head: ProfileHead | None
    problem: str = ""

    @property
    def weights(self) -> str:
        return self.info.name.partition("/")[0]

    @property
    def digest(self) -> str:
        return self.info.name.partition("/")[2]


class ProfileRow(msgspec.Struct, frozen=True):
    """What people see of a profile. ``is_newest``: new servers with its model take it."""

    digest: str
    weights: str
    model: str
    target_kl: float | None  # the default
    num_bytes: int
    put_s: float  # seconds since the epoch
    is_newest: bool
    problem: str  # why servers pass over it; "" if they do not


def parse_head(name: str, data: bytes, size_bytes: int) -> ProfileHead:
    """Parse what stands before a profile. ``data``: the first bytes of the stored object ``name``, `MAX_HEAD_BYTES` or
    all; ``size_bytes``: its size. Raises FormatError."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        raise CorruptError(f"a stored profile starts with {_MAGIC!r}, this one with {data[:4]!r}")
    end = _HEAD.size + _HEAD.unpack_from(data)[1]
    if end > min(MAX_HEAD_BYTES, len(data)):
        raise CorruptError(f"its header ends at byte {end}, after the first {min(len(data), MAX_HEAD_BYTES)}")
    try:
        version = msgspec.json.decode(data[_HEAD.size : end], type=_Version).version
        if version != VERSION:
            raise FormatVersionError(f"its header has version {version}, expected {VERSION}")
        header = msgspec.json.decode(data[_HEAD.size : end], type=ProfileHeader)
    except DECODE_ERRORS as e:
        raise CorruptError(f"its header is malformed: {e}") from e
    if name != f"{header.weights}/{header.digest}":
        raise CorruptError(f"its header belongs to {header.weights}/{header.digest}")
    num_bytes = header.num_bytes + (0 if header.encryption is None else TAG_BYTES)
    if (found := size_bytes - end) != num_bytes:
        raise CorruptError(f"it has {found} bytes after its header, expected {num_bytes}")
    return ProfileHead(header, end)


PROFILES = NoteKind(
    "profiles",
    "profile",
    re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}"),
    max_bytes=MAX_PROFILE_BYTES,
    max_notes=_MAX_PROFILES,
    checked_bytes=MAX_HEAD_BYTES,
    check=parse_head,
    max_part=1 / 8,
    max_beside=64,
)
NOTE_KINDS = {kind.name: kind for kind in (PINS, PROFILES)}


def seal_profile(path: Path, keys: StoreKeys) -> tuple[str, bytes]:
    """Return the name and the bytes under which a store keeps the profile in a file. Raises ConfigError."""
    from sgl_kvfetch.codec import load_profile  # loads torch, which a store does without
    from sgl_kvfetch.codec.quant.profile import EXACT_BITS

    profile = load_profile(path)
    if profile.default_bits >= EXACT_BITS:
        raise ConfigError(
            f"profile {path} takes {profile.default_bits:.1f} bits per value at its default, expected fewer than "
            f"{EXACT_BITS:g}, which 'exact' takes; {profile.few_tokens or 'serve this model with exact'}"
        )
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(f"profile {path} cannot be read: {why(e)}") from e
    weights, digest, encryption = profile.calibration.weights, profile.digest, None
    name = f"{weights}/{digest}"
    if not PROFILES.has_name(name):
        raise ConfigError(f"profile {path} is of weights {weights[:60]!r}, expected their fingerprint: calibrate again")
    sealed = content
    if keys:
        key, salt = keys.ids[0], secrets.token_bytes(SALT_BYTES)
        encryption = _Encryption(key, salt.hex())
        sealed = keys.cipher(key, salt, _place(name)).encrypt(0, content)
    header = ProfileHeader(
        VERSION,
        weights,
        digest,
        hashlib.sha256(content).hexdigest(),
        len(content),
        profile.calibration.model[:MAX_LABEL_CHARS],
        profile.default_target_kl,
        encryption,
    )
    encoded = msgspec.json.encode(header)
    head = _HEAD.pack(_MAGIC, len(encoded)) + encoded
    if len(head) + len(sealed) > MAX_PROFILE_BYTES:
        raise ConfigError(f"profile {path} has {len(content)} bytes; stores keep {MAX_PROFILE_BYTES} at most")
    return name, head + sealed


def open_sealed(data: bytes, head: ProfileHead, keys: StoreKeys) -> bytes:
    """Return the profile's file. ``data``: the whole stored object, with this head. Raises FormatError."""
    head.require_readable(keys)
    header = head.header
    content = data[head.num_bytes :]
    if header.encryption is not None:
        name = f"{header.weights}/{header.digest}"
        cipher = keys.cipher(header.encryption.key, bytes.fromhex(header.encryption.salt), _place(name))
        content = cipher.decrypt(0, content, "it")
    if hashlib.sha256(content).hexdigest() != header.sha256:
        raise CorruptError("it is damaged: its SHA-256 is not the one in its header")
    return content


def _place(name: str) -> bytes:
    return b"profile " + name.encode()


async def publish_profile(store: AdminStore, path: Path, keys: StoreKeys) -> str:
    """Put a profile into a store, as the newest of its model. Return its name. Raises ConfigError and StoreError."""
    name, data = await asyncio.to_thread(seal_profile, path, keys)
    await store.put_note(PROFILES, name, data)
    return name


async def list_profiles(store: AdminStore, prefix: str = "", most: int = _MAX_PROFILES) -> list[ListedProfile]:
    """Return a store's profiles whose names start with ``prefix``, the newest first, at most ``most``.

    Reads the first bytes of each. Those that cannot be used have a ``problem``. Keys are not looked at. Raises
    StoreError if the whole store fails.
    """
    infos = [info for info in await store.notes(PROFILES) if info.name.startswith(prefix)]
    infos = sorted(infos, key=lambda info: (info.modified_s, info.name), reverse=True)[:most]
    found: list[ListedProfile] = []
    for first in range(0, len(infos), _READS_AT_ONCE):
        found += await together(_look_at(store, info) for info in infos[first : first + _READS_AT_ONCE])
    return found


async def _look_at(store: AdminStore, info: ObjectInfo) -> ListedProfile:
    try:
        length = min(info.size_bytes, MAX_HEAD_BYTES)
        data = await store.get_note(PROFILES, info.name, length)
        if data is None:
            return ListedProfile(info, None, "it was deleted meanwhile")
        return ListedProfile(info, parse_head(info.name, data, info.size_bytes))
    except (FormatError, StoreError) as e:
        if not e.concerns_object:
            raise
        return ListedProfile(info, None, str(e))


async def read_profile(store: AdminStore, listed: ListedProfile, keys: StoreKeys) -> bytes:
    """Return the file of a profile that holders of ``keys`` have published. Raises FormatError and StoreError."""
    if listed.head is None:
        raise FormatError(listed.problem)
    listed.head.require_readable(keys)  # before the rest is read
    data = await store.get_note(PROFILES, listed.info.name, listed.info.size_bytes)
    if data is None:
        raise StoreError("missing", "it was deleted meanwhile")
    head = parse_head(listed.info.name, data[:MAX_HEAD_BYTES], len(data))
    return await asyncio.to_thread(open_sealed, data, head, keys)


def profile_rows(listed: Sequence[ListedProfile], keys: StoreKeys) -> list[ProfileRow]:
    """Describe profiles, which are sorted from the newest on, as servers with ``keys`` see them."""
    seen: set[str] = set()
    rows = []
    for each in listed:
        problem, header = each.problem, None if each.head is None else each.head.header
        if each.head is not None:
            try:
                each.head.require_trusted(keys)
            except FormatError as e:
                problem = str(e)
        is_newest = not problem and each.weights not in seen
        if is_newest:
            seen.add(each.weights)
        model, target_kl = ("", None) if header is None else (header.model, header.target_kl)
        size, put_s = each.info.size_bytes, each.info.modified_s
        rows.append(ProfileRow(each.digest, each.weights, model, target_kl, size, put_s, is_newest, problem))
    return rows
