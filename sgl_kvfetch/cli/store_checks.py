"""Checks of a store: whether it is reachable, accepts our token, and answers lookups."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.cli.checks import Check
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions
from sgl_kvfetch.stores.open import open_store

TIMEOUT_S = 10.0


def check_store(url: str, token: str | None) -> list[Check]:
    """Check a store without changing it. Raises ConfigError for an invalid URL."""
    if urlsplit(url).scheme == "file":
        store, checks = open_store(url), [_check_directory(Path(unquote(urlsplit(url).path)))]
    else:
        store, checks = open_store(url, token=token, options=HttpOptions(timeout_s=TIMEOUT_S, max_attempts=2)), []
    return checks + asyncio.run(_ask(store, url, has_token=token is not None))


def _check_directory(path: Path) -> Check:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        advice = f"make {existing} a directory that this user can write, or choose another"
        return Check("store writable", "no", f"{existing} is not a writable directory", advice)
    return Check("store writable", "yes", str(path) if existing == path else f"{path}, created at the first write")


async def _ask(store: Store, url: str, *, has_token: bool) -> list[Check]:
    started_s = time.perf_counter()
    try:
        # A random page is stored nowhere. An empty answer shows that lookups work.
        namespace = f"{secrets.token_hex(16)}.0-1"
        await store.lookup(namespace, [secrets.token_bytes(PAGE_HASH_BYTES)])
    except StoreError as e:
        return _failed(e, url, has_token)
    finally:
        await store.close()
    took_ms = 1000 * (time.perf_counter() - started_s)
    return [
        Check("store reachable", "yes", url),
        Check("store authorised", "yes", "with a token" if has_token else "without a token"),
        Check("store lookup", "yes", f"answered in {took_ms:.0f} ms, including the connection"),
    ]


def _failed(error: StoreError, url: str, has_token: bool) -> list[Check]:
    match error.reason:
        case "refused" | "timeout":
            advice = f"start the store (kvfetch serve), check the address, firewalls and proxies: {url}"
            return [Check("store reachable", "no", str(error), advice)]
        case "unauthorised":
            advice = "check the token" if has_token else "give the store's token: --token-file, or KVFETCH_TOKEN"
            return [Check("store reachable", "yes", url), Check("store authorised", "no", str(error), advice)]
    advice = f"check that {url} is a kvfetch store, and read its log"
    return [Check("store reachable", "yes", url), Check("store lookup", "no", str(error), advice)]
