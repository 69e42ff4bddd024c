"""A store by its URL."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpOptions, HttpStore
from sgl_kvfetch.stores.local import LocalStore


def open_store(
    url: str,
    *,
    token: str | None = None,
    capacity_bytes: int | None = None,
    options: HttpOptions | None = None,
) -> Store:
    """Make the client of the store at ``url``. No I/O: an unreachable store shows at the first request.

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
                raise ConfigError(f"store URL {url!r} has a query or a fragment; a path alone is expected")
            if token is not None:
                raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is a directory")
            return LocalStore(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
        case _:
            raise ConfigError(f"store URL {url!r} is not supported; use http://, https:// or file:///path")
