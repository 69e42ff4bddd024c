"""Open a store by its URL: one that several processes share. `directory.open_store` also opens a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores.base import AdminStore
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.remote import HttpOptions, Token
from sgl_kvfetch.user_files import STORE_URLS

_SCHEMES = {*STORE_URLS, "file"}  # `directory.open_store` opens the last one


@dataclass(frozen=True, slots=True)
class S3Options:
    """What ``s3://`` stores need beside `HttpOptions`. Without ``index``, lookups go by the names of segments."""

    config: Mapping[str, Any] = field(default_factory=dict, repr=False)  # obstore's keys
    index: str | None = field(default=None, repr=False)  # URL: see `IndexOptions`
    index_timeout_s: float = 0.5
    on_index_failure: Callable[[StoreError], None] = lambda error: None


def split_store_url(url: str) -> SplitResult:
    """Return the parts of a store's URL. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as e:
        raise ConfigError(f"store URL {url!r} is malformed: {e}") from e
    if parts.scheme not in _SCHEMES:
        forms = " or ".join((*STORE_URLS.values(), "file:///DIRECTORY"))
        raise ConfigError(f"store URL {url!r} is not supported; expected {forms}")
    return parts


def open_remote(
    url: str,
    *,
    token: Token | None = None,
    options: HttpOptions | None = None,
    s3: S3Options | None = None,
) -> AdminStore:
    """Create a client of the store at ``url``. Does no I/O: the first request fails if the store is unreachable.

    ``token`` is for ``http(s)://`` stores, ``options`` is for all, ``s3`` for ``s3://`` ones. Raises ConfigError.
    """
    options, s3 = options or HttpOptions(), s3 or S3Options()
    scheme = split_store_url(url).scheme
    if token is not None and scheme == "s3":
        raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is a bucket")
    match scheme:
        case "http" | "https":
            return HttpStore(url, token=token, options=options)
        case "s3":
            return _open_s3(url, options, s3)
    raise ConfigError(f"{url!r} is a directory of this machine; expected a store that others share")


def takes_token(url: str) -> bool:
    return not url.startswith(("s3:", "file:"))


def _open_s3(url: str, options: HttpOptions, s3: S3Options) -> AdminStore:
    try:
        from sgl_kvfetch.stores.s3 import S3Store

        if s3.index is None:
            return S3Store(url, options=options, config=s3.config)
        from sgl_kvfetch.stores.indexed_s3 import IndexedS3Store
        from sgl_kvfetch.stores.redis_index import IndexOptions
    except ImportError as e:
        raise ConfigError(f"{url} needs a package that is missing ({e}): pip install '.[s3]' in a checkout") from e
    index = IndexOptions(s3.index, timeout_s=s3.index_timeout_s, on_failure=s3.on_index_failure)
    return IndexedS3Store(url, index, options=options, config=s3.config)
