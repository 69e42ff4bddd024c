"""Open a store by its URL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.codec import read_encryption_keys, read_manifest_keys
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores import MAX_HEDGES, AdminStore, HedgedStore, HttpOptions, HttpStore, OnHedge, Store, TlsFiles

if TYPE_CHECKING:
    from sgl_kvfetch.plane.config import KVFetchConfig

# Connections in addition to those for reads, so that lookups, writes and second requests never wait for a read.
_SPARE_CONNECTIONS = 8


@dataclass(frozen=True, slots=True)
class S3Options:
    """What ``s3://`` stores need beside `HttpOptions`. Without ``index``, lookups go by the names of segments."""

    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # obstore's keys
    index: str | None = field(default=None, repr=False)  # URL: see `IndexOptions`
    index_ttl_s: float = 7 * 86400.0
    index_timeout_s: float = 0.5
    on_index_failure: Callable[[StoreError], None] = lambda error: None

    @classmethod
    def of(cls, config: KVFetchConfig) -> Self:
        s3, index = config.s3 or {}, config.index
        return cls(s3) if index is None else cls(s3, index.url, index.ttl_s)


def open_store(
    url: str,
    *,
    token: str | None = None,
    capacity_bytes: int | None = None,
    options: HttpOptions | None = None,
    s3: S3Options | None = None,
) -> AdminStore:
    """Create a client of the store at ``url``. Does no I/O: the first request fails if the store is unreachable.

    ``token`` is for ``http(s)://`` stores, ``options`` is for these and ``s3://`` ones, ``s3`` only for the latter,
    ``capacity_bytes`` for ``file://`` ones. Raises ConfigError.
    """
    options, s3 = options or HttpOptions(), s3 or S3Options()
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as e:
        raise ConfigError(f"store URL {url!r} is malformed: {e}") from e
    if token is not None and parts.scheme in ("file", "s3"):
        kind = "a directory" if parts.scheme == "file" else "a bucket"
        raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is {kind}")
    if capacity_bytes is not None and parts.scheme in ("http", "https", "s3"):
        raise ConfigError(f"capacity_bytes is for file:// stores; {url!r} has its own limit")
    match parts.scheme:
        case "http" | "https":
            return HttpStore(url, token=token, options=options)
        case "s3":
            return _open_s3(url, options, s3)
        case "file":
            from sgl_kvfetch.directory import LocalStore  # clients of other stores start sooner without it

            if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
                raise ConfigError(f"store URL {url!r} needs an absolute path, as in file:///var/cache/kv")
            if parts.query or parts.fragment:
                raise ConfigError(f"store URL {url!r} has a query or a fragment; expected only a path")
            return LocalStore(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
        case _:
            raise ConfigError(f"store URL {url!r} is not supported; use http://, https://, s3://bucket or file:///path")


def _open_s3(url: str, options: HttpOptions, s3: S3Options) -> AdminStore:
    try:
        from sgl_kvfetch.stores import S3Store

        if s3.index is None:
            return S3Store(url, options=options, config=s3.config)
        from sgl_kvfetch.stores import IndexedS3Store, IndexOptions
    except ImportError as e:
        raise ConfigError(f"{url} needs a package that is missing ({e}): pip install 'sgl_kvfetch[s3]'") from e
    index = IndexOptions(s3.index, s3.index_ttl_s, s3.index_timeout_s, on_failure=s3.on_index_failure)
    return IndexedS3Store(url, index, options=options, config=s3.config)


def takes_token(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def open_hedged(
    url: str,
    *,
    token: str | None = None,
    options: HttpOptions,
    s3: S3Options | None = None,
    max_hedges: int = MAX_HEDGES,
    on_hedge: OnHedge = lambda kind, result: None,
    on_received: Callable[[int], None] = lambda num_bytes: None,
) -> Store:
    """Create a client of the store at ``url`` with hedged reads (`HedgedStore`). Reads of a directory are not hedged.

    ``options.max_connections`` limits concurrent reads. The rest is as in `open_store`. Raises ConfigError.
    """
    if url.startswith("file:"):
        return open_store(url, token=token)
    more = replace(options, max_connections=options.max_connections + _SPARE_CONNECTIONS)
    store = open_store(url, token=token, options=more, s3=s3)
    return HedgedStore(store, options.max_connections, max_hedges, on_hedge, on_received)


def check_files(config: KVFetchConfig) -> None:
    """Check the files and the keys that a config names for its stores. Does no network I/O. Raises ConfigError."""
    read_manifest_keys(config.manifest_key_file)
    read_encryption_keys(config.encryption_key_file)
    tls = TlsFiles(config.tls.ca_file, config.tls.cert_file, config.tls.key_file)
    tls.context()
    if config.store.startswith("s3:"):
        open_store(config.store, options=HttpOptions(tls=tls), s3=S3Options.of(config))
