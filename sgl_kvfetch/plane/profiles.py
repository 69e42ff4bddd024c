"""The profile that a server takes: the newest of its model's weights in its store that fits, and a copy of it here.

``quantiser = "klt"`` without a ``profile`` asks the store once, when the backend is attached: the data plane does so
before it serves, since the engine's process opens no store. The copy is the path that
everything behind it works with, so nothing else knows where a profile came from. Copies also let a server start while
its store is down: it takes the copy that was last taken here for these weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from sgl_kvfetch.codec import StoreKeys, load_profile
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError, StoreError, why
from sgl_kvfetch.log import brief, one_line, printable
from sgl_kvfetch.plane.access import WAIT_S, open_profile_store, store_keys
from sgl_kvfetch.protocol import KVFetchConfig, TakenProfile, messages as m, require_profile_file
from sgl_kvfetch.stores import AdminStore, ListedProfile, list_profiles, read_profile

logger = logging.getLogger(__name__)

_MOST_TRIED = 8  # of the newest: a store cannot keep a server from its start
_SUFFIX = ".profile"
_PLACE_CHARS = 16

Fits: TypeAlias = "Callable[[str], None]"
"""Raises ConfigError unless the engine can serve by the profile in a file."""


class PassedOver:
    """The profiles of a store that cannot be used. Each is told of once, and not read again unless its fault may pass.
    One that was put again is another one."""

    def __init__(self) -> None:
        self._final: dict[tuple[str, float], bool] = {}  # by name and time: whether to read it no more

    def others(self, listed: Sequence[ListedProfile]) -> list[ListedProfile]:
        """Return those that may be of use. Forget profiles that are gone: whoever may write puts any number."""
        known = {_put(each): self._final[_put(each)] for each in listed if _put(each) in self._final}
        self._final = known
        return [each for each in listed if not known.get(_put(each), False)]

    def add(self, listed: ListedProfile, fault: Exception) -> bool:
        """Return whether it is new."""
        is_new = _put(listed) not in self._final
        may_pass = listed.head is None or isinstance(fault, StoreError) or not isinstance(fault, KVFetchError)
        self._final[_put(listed)] = not may_pass
        return is_new


def _put(listed: ListedProfile) -> tuple[str, float]:
    return listed.info.name, listed.info.modified_s


def answer(command: m.TakeProfile) -> m.ProfileTaken | m.Refused:
    """Take the profile that an engine asks for. Waits for the store."""
    config, watch = KVFetchConfig.model_validate(command.config), command.watch
    try:
        fits = partial(require_profile_file, watch.needs)
        return m.ProfileTaken(take_profile(config, watch.weights, fits, command.digest))
    except KVFetchError as e:
        return m.Refused.of(e)


def take_profile(config: KVFetchConfig, weights: str, fits: Fits, digest: str | None = None) -> TakenProfile | None:
    """Return the newest profile of a model's weights that can be used, as a file of this machine: from the store, or,
    while that cannot be asked, the one that was taken last. None if the store has none.

    Profiles of one model's weights differ in the layers and heads that their cells have, and in the targets that they
    reach. So one that does not fit is passed over. ``digest``: the profile to take, by another rank's choice.

    Raises StoreError if the store cannot be asked and there is no copy here, and ConfigError if none can be kept.
    """
    try:
        return asyncio.run(take_from_store(config, weights, fits, digest))
    except StoreError as e:
        copy = _newest_copy(_copies_folder(config, weights, store_keys(config)), fits, digest)
        if copy is None:
            raise
        logger.warning("kvfetch: %s cannot be asked for a profile: %s", config.store, e)
        return TakenProfile(str(copy), copy.stem, f"profile {copy.stem}, the copy that this machine took last: {copy}")


def _copies_folder(config: KVFetchConfig, weights: str, keys: StoreKeys) -> Path:
    """Return where copies are of what this store had that holders of ``keys`` published. Each was verified when it
    was made, so no copy counts for another store, or for keys that it was not verified with."""
    return cache_folder("profiles", weights, config.store, " ".join(keys.ids))


async def take_from_store(
    config: KVFetchConfig,
    weights: str,
    fits: Fits,
    digest: str | None = None,
    passed_over: PassedOver | None = None,
) -> TakenProfile | None:
    """Do as `take_profile`, but raise StoreError if the store cannot be asked. ``passed_over``: what this has passed
    over before, for whoever asks again and again."""
    keys = store_keys(config)
    folder, store = _copies_folder(config, weights, keys), open_profile_store(config)
    passed_over = PassedOver() if passed_over is None else passed_over
    try:
        for listed in passed_over.others(await _candidates(store, f"{weights}/{digest or ''}")):
            try:
                path = await _copy_of(store, listed, keys, folder)
                await asyncio.to_thread(fits, str(path))
            except Exception as e:  # whoever may write into the store has made it: no fault of it ends anything else
                if isinstance(e, KVFetchError) and not e.concerns_object:
                    raise
                if passed_over.add(listed, e):
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
        async with asyncio.timeout(WAIT_S):
            return await list_profiles(store, prefix, _MOST_TRIED)
    except TimeoutError as e:
        raise StoreError("timeout", f"listing profiles: no answer within {WAIT_S:g} s") from e


async def _copy_of(store: AdminStore, listed: ListedProfile, keys: StoreKeys, folder: Path) -> Path:
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


def _newest_copy(folder: Path, fits: Fits, digest: str | None) -> Path | None:
    """Return the copy that was taken last and fits, or the one with this digest."""
    try:
        copies = sorted(folder.glob(f"{digest or '*'}{_SUFFIX}"), key=lambda path: path.stat().st_mtime, reverse=True)
    except OSError:
        return None
    for path in copies:
        try:
            if load_profile(path).digest == path.stem:
                fits(str(path))
                return path
        except Exception as e:  # as in `take_from_store`: it may be damaged in any way
            what = one_line(e) if isinstance(e, KVFetchError) else f"{path} cannot be read: {brief(e)}"
            logger.warning("kvfetch: %s", what)
    return None


def cache_folder(kind: str, weights: str, store: str, more: str = "") -> Path:
    """Return the folder of the user's cache, as the XDG base directories have it, for what this machine keeps of this
    kind, of a model's weights, and of a store. ``more``: what else it depends on."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    cache = base if os.path.isabs(base) else os.path.expanduser("~/.cache")
    place = hashlib.sha256(f"{more}{store.rstrip('/')}".encode()).hexdigest()[:_PLACE_CHARS]
    return Path(cache, "sgl_kvfetch", kind, f"{weights}-{place}")
