"""Open a store by its URL, or by the URLs of its replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions, HttpStore
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.stores.replicas import ReplicaOptions, ReplicatedStore

# Connections in addition to those for reads, so that lookups, writes and second requests never wait for a read.
_SPARE_CONNECTIONS = 8
_ATTEMPTS_OF_REPLICA = 2  # before another replica is asked


def open_store(
    url: str,
    *,
    token: str | None = None,
    capacity_bytes: int | None = None,
    options: HttpOptions | None = None,
) -> Store:
    """Create a client of the store at ``url``. Does no I/O: the first request fails if the store is unreachable.

    ``token`` and ``options`` are for ``http(s)://`` stores, ``capacity_bytes`` is for ``file://`` ones. Raises
    ConfigError.
    """
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as e:
        raise ConfigError(f"store URL {url!r} is malformed: {e}") from e
    match parts.scheme:
        case "http" | "https":
            if capacity_bytes is not None:
                raise ConfigError(f"capacity_bytes is for file:// stores; {url!r} has its own limit")
            return HttpStore(url, token=token, options=options or HttpOptions())
        case "file":
            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise ConfigError(f"store URL {url!r} needs an absolute path, as in file:///var/cache/kv")
            if parts.query or parts.fragment:
                raise ConfigError(f"store URL {url!r} has a query or a fragment; expected only a path")
            if token is not None:
                raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is a directory")
            return LocalStore(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
        case _:
            raise ConfigError(f"store URL {url!r} is not supported; use http://, https:// or file:///path")


def open_replicas(
    urls: Sequence[str], *, token: str | None = None, options: HttpOptions, replicas: ReplicaOptions
) -> Store:
    """Create a client of one or more replicas that hedges stalled reads. A single ``file:`` URL opens a plain store.

    ``token`` is for HTTP replicas; ``options.max_connections`` limits concurrent reads. Raises ConfigError.
    """
    if not urls:
        raise ConfigError("no store URL is given; expected at least one")
    remote = [url for url in urls if not url.startswith("file:")]
    if not remote and len(urls) == 1:
        return open_store(urls[0], token=token)
    if token is not None and not remote:
        raise ConfigError(f"a token is for http:// and https:// stores; all of {list(urls)} are directories")
    shared = replace(
        options,
        max_connections=options.max_connections + _SPARE_CONNECTIONS,
        max_attempts=options.max_attempts if len(urls) == 1 else min(options.max_attempts, _ATTEMPTS_OF_REPLICA),
    )
    stores = [(url, open_store(url, token=token if url in remote else None, options=shared)) for url in urls]
    return ReplicatedStore(stores, replace(replicas, max_reads=options.max_connections))
