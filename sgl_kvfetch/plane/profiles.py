"""The profile that a server takes: the newest that its store has of its model's weights, and a copy of it here.

``quantiser = "klt"`` without a ``profile`` asks the store once, when the backend is attached. The copy is the path that
everything behind it works with, so nothing else knows where a profile came from. Copies also let a server start while
its store is down: it takes the copy that was last taken here for these weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from pathlib import Path

import msgspec

from sgl_kvfetch.codec import load_profile, read_encryption_keys, read_manifest_keys
from sgl_kvfetch.directory import open_store
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError, StoreError, why
from sgl_kvfetch.log import brief, one_line, printable
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.plane.store_options import s3_options, tls_files
from sgl_kvfetch.stores import AdminStore, HttpOptions, ListedProfile, ProfileKeys, list_profiles, read_profile

logger = logging.getLogger(__name__)

_WAIT_S = 10.0  # for the store's list; a profile itself may take longer, by its size
_MOST_TRIED = 4  # of the newest: a store cannot keep a server from its start
_CONNECT_S = 5.0
_SUFFIX = ".profile"
_PLACE_CHARS = 16


class TakenProfile(msgspec.Struct, frozen=True):
    path: str
    digest: str
    about: str  # one line for the log


def profile_keys(config: KVFetchConfig) -> ProfileKeys:
    """Read the keys that a config names. Raises ConfigError."""
    return ProfileKeys(read_manifest_keys(config.manifest_key_file), read_encryption_keys(config.encryption_key_file))


def open_profile_store(config: KVFetchConfig) -> AdminStore:
    """Open the store that a config names, for its profiles: without its local cache. Raises ConfigError."""
    return open_store(
        config.store,
        token=config.token,
        options=HttpOptions(
            timeout_s=_WAIT_S,
            connect_timeout_s=_CONNECT_S,
            tls=tls_files(config),
        ),
        s3=s3_options(config),
    )


def take_profile(config: KVFetchConfig, weights: str, digest: str | None = None) -> TakenProfile | None:
    """Return the newest profile of a model's weights that can be used, as a file of this machine: from the store, or,
    while that cannot be asked, the one that was taken last. None if the store has none.

    ``digest``: the profile to take, by another rank's choice. Raises StoreError if the store cannot be asked and there
    is no copy here, and ConfigError if none can be kept.
    """
    folder = _copies_folder(config, weights)
    try:
        return asyncio.run(take_from_store(config, weights, digest))
    except StoreError as e:
        copy = _newest_copy(folder, digest)
        if copy is None:
            raise
        logger.warning("kvfetch: %s cannot be asked for a profile: %s", config.store, e)
        return TakenProfile(str(copy), copy.stem, f"profile {copy.stem}, the copy that this machine took last: {copy}")


def _copies_folder(config: KVFetchConfig, weights: str) -> Path:
    """Return where copies are of what this store had that holders of these keys published. Each was verified when it
    was made, so no copy counts for another store, or for keys that it was not verified with."""
    return cache_folder("profiles", weights, config.store, profile_keys(config).fingerprint)


async def take_from_store(config: KVFetchConfig, weights: str, digest: str | None = None) -> TakenProfile | None:
    """Do as `take_profile`, but raise StoreError if the store cannot be asked."""
    folder = _copies_folder(config, weights)
    keys, store = profile_keys(config), open_profile_store(config)
    try:
        for listed in await _candidates(store, f"{weights}/{digest or ''}"):
            try:
                path = await _copy_of(store, listed, keys, folder)
            except Exception as e:  # whoever may write into the store has made it: no fault of it ends anything else
                if isinstance(e, KVFetchError) and not e.concerns_object:
                    raise
                what = one_line(e) if isinstance(e, KVFetchError) else brief(e)
                logger.warning("kvfetch: %s: profile %s is passed over: %s", config.store, listed.info.name, what)
                continue
            assert listed.head is not None
            header = listed.head.header
            about = (
                f"profile {listed.digest} of {printable(header.model)!r} from {config.store}, the newest of its "
                f"weights, with a default target_kl of {header.target_kl:.2g}; copy: {path}"
            )
            return TakenProfile(str(path), listed.digest, about)
        return None
    finally:
        await store.close()


async def _candidates(store: AdminStore, prefix: str) -> list[ListedProfile]:
    try:
        async with asyncio.timeout(_WAIT_S):
            return await list_profiles(store, prefix, _MOST_TRIED)
    except TimeoutError as e:
        raise StoreError("timeout", f"listing profiles: no answer within {_WAIT_S:g} s") from e


async def _copy_of(store: AdminStore, listed: ListedProfile, keys: ProfileKeys, folder: Path) -> Path:
    """Return the path of this machine's copy of a profile, after checks. Raises KVFetchError."""
    if listed.head is None:
        raise FormatError(listed.problem)
    listed.head.require_readable(keys)
    path = folder / f"{listed.digest}{_SUFFIX}"
    if not await asyncio.to_thread(_is_copy, path, listed.head.header.sha256):
        content = await read_profile(store, listed, keys)
        await asyncio.to_thread(_keep, content, path, listed)
    return path


def _is_copy(path: Path, sha256: str) -> bool:
    """Return whether a file has this SHA-256, and note its use."""
    try:
        with path.open("rb") as file:
            is_same = hashlib.file_digest(file, "sha256").hexdigest() == sha256
        if is_same:
            os.utime(path)
        return is_same
    except OSError:
        return False


def _keep(content: bytes, path: Path, listed: ListedProfile) -> None:
    """Write a copy, if it is the profile of its name. Raises ConfigError and FormatError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            partial.touch(mode=0o600)
            partial.write_bytes(content)
            _require_same(partial, listed)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as e:
        raise CopyError(
            f"no copy of a profile can be kept in {path.parent}: {why(e)}; set XDG_CACHE_HOME to a folder that SGLang "
            "may write to"
        ) from e


def _require_same(path: Path, listed: ListedProfile) -> None:
    """Raise FormatError unless a file is the profile that a store lists. Raises ConfigError if it is no profile."""
    profile = load_profile(path)
    if (profile.calibration.weights, profile.digest) != (listed.weights, listed.digest):
        raise FormatError(f"it is the profile {profile.calibration.weights}/{profile.digest}, under another name")


class CopyError(ConfigError):
    """This machine cannot keep a copy, of any profile."""

    @property
    def concerns_object(self) -> bool:
        return False


def _newest_copy(folder: Path, digest: str | None) -> Path | None:
    """Return the copy that was taken last, or the one with this digest."""
    try:
        copies = sorted(folder.glob(f"{digest or '*'}{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    for path in copies:
        try:
            if load_profile(path).digest == path.stem:
                return path
        except Exception as e:  # as in `take_from_store`: it may be damaged in any way
            what = one_line(e) if isinstance(e, KVFetchError) else f"{path} cannot be read: {brief(e)}"
            logger.warning("kvfetch: %s", what)
    return None


def cache_folder(kind: str, weights: str, store: str, secret: bytes = b"") -> Path:
    """Return the folder of the user's cache, as the XDG base directories have it, for what this machine keeps of this
    kind, of a model's weights, and of a store. ``secret``: what else it depends on, which it does not tell."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    place = hashlib.sha256(secret + store.rstrip("/").encode()).hexdigest()[:_PLACE_CHARS]
    return Path(cache, "sgl_kvfetch", kind, f"{weights}-{place}")
