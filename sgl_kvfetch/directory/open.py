"""Open any store by its URL: a directory of this machine, or one that other machines share."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.stores import AdminStore, HttpOptions, S3Options
from sgl_kvfetch.stores.open import open_remote, split_store_url


def open_store(
    url: str,
    *,
    token: str | None = None,
    capacity_bytes: int | None = None,
    options: HttpOptions | None = None,
    s3: S3Options | None = None,
) -> AdminStore:
    """Open a directory, or create a client of another store (`stores.open_remote`). ``capacity_bytes``: for ``file://``
    stores. Raises ConfigError."""
    parts = split_store_url(url)
    if parts.scheme != "file":
        if capacity_bytes is not None:
            raise ConfigError(f"capacity_bytes is for file:// stores; {url!r} has its own limit")
        return open_remote(url, token=token, options=options, s3=s3)
    if token is not None:
        raise ConfigError(f"a token is for http:// and https:// stores; {url!r} is a directory")
    from sgl_kvfetch.directory.local import LocalStore  # clients of other stores start sooner without it

    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"store URL {url!r} needs an absolute path, as in file:///var/cache/kv")
    if parts.query or parts.fragment:
        raise ConfigError(f"store URL {url!r} has a query or a fragment; expected only a path")
    return LocalStore(Path(unquote(parts.path)), capacity_bytes=capacity_bytes)
