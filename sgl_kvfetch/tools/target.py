"""Opens what a command works on: a store, or a part of one.

Where a store cannot be used, its client says what was wrong, and this says what to type.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import parse_object_name
from sgl_kvfetch.stores import AdminStore
from sgl_kvfetch.stores.upkeep import StoredSegment, list_segments
from sgl_kvfetch.tools.terminal import IndexedAccess, StoreAccess

_HANDSHAKE_S = 5.0
_S3_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment to a key that may use this bucket"


def advice(error: StoreError, token_source: str | None) -> str | None:
    """Return what to type, or None if that is not known. ``token_source``: where the token came from, if one was given.

    May ask the server whether it speaks TLS.
    """
    url = urlsplit(error.url or "")
    is_s3 = url.scheme == "s3"
    match error.reason:
        case "refused" if is_s3:
            return "no S3 server answers there: correct AWS_ENDPOINT_URL in the environment, or the network"
        case "refused" | "timeout" if error.url:
            return "no store answers there: start it with kvfetch serve DIRECTORY, or correct the host and port"
        case "unauthorised" if is_s3:
            return _S3_KEYS
        case "unauthorised" if error.url and token_source is not None:
            return f"the token came from {token_source}: give another one with --token-file FILE"
        case "unauthorised" if error.url:
            return "give the store's token: --token-file FILE, or KVFETCH_TOKEN in the environment"
        case "truncated" if url.scheme == "http" and _speaks_tls(url.hostname or "", url.port or 80):
            return f"it speaks TLS: type {url._replace(scheme='https').geturl()}"
    return None


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        with socket.create_connection((host, port), _HANDSHAKE_S) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


INDEX_TIMEOUT_S = 30.0  # commands can wait longer than servers
_ADDRESS = re.compile(r"[\w.-]+:[0-9]{1,5}/?|\[[0-9a-f:]+\]:[0-9]{1,5}/?")

T = TypeVar("T")


def store_url(text: str) -> str:
    """Return the URL of a store that the user named by its URL or its directory. Raises ConfigError for HOST:PORT."""
    return text if "://" in text else Path(require_scheme(text)).resolve().as_uri()


def require_scheme(text: str) -> str:
    """Return ``text`` unless it is empty, or looks like an address without its scheme. Raises ConfigError."""
    if not text:  # it would be this folder
        raise ConfigError("expected a URL or a directory, found an empty word: a variable of the shell is not set")
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        raise ConfigError(f"{text!r} has no scheme: type http://{text}, or https:// if it speaks TLS")
    return text


def _open_existing(text: str, access: StoreAccess, **options: Any) -> AdminStore:
    """A directory must exist: a typo would look like an empty store. Raises ConfigError."""
    from sgl_kvfetch.directory import open_store
    from sgl_kvfetch.stores import HttpOptions, S3Options, takes_token

    index = access.index if isinstance(access, IndexedAccess) else None
    url, token = store_url(text), access.secret  # which is refused if it cannot be read, whatever the store is
    if index is not None and not url.startswith("s3:"):
        raise ConfigError(f"--index is for s3:// stores; {url} has its own")
    parts = urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise ConfigError(
            f"{url} is not a directory; another machine's store is http://HOST:PORT or s3://BUCKET/PREFIX"
        )
    http = replace(options.pop("options", HttpOptions()), tls=access.certificate)
    s3 = S3Options(index=index, index_timeout_s=INDEX_TIMEOUT_S)
    return open_store(url, token=token if takes_token(url) else None, s3=s3, options=http, **options)


def run_on_store(text: str, access: StoreAccess, work: Callable[[AdminStore], Awaitable[T]], **options: Any) -> T:
    """Open a store that the user named by its URL or its directory, and return what ``work`` returns for it.

    ``options`` are for `open_store`. Raises KVFetchError; a StoreError gets a note of what to type.
    """

    async def run() -> T:
        store = _open_existing(text, access, **options)
        try:
            return await work(store)
        except StoreError as e:
            if (note := advice(e, access.token_source)) is not None:
                e.add_note(note)
            raise
        finally:
            await store.close()

    return asyncio.run(run())


@dataclass(frozen=True, slots=True)
class StorePart:
    """The objects of a store whose names start with ``prefix``: "" for all. ``name``: what the user calls the store."""

    store: AdminStore
    name: str
    prefix: str

    @property
    def label(self) -> str:
        return f"{self.name}#{self.prefix}" if self.prefix else self.name

    async def list_segments(self) -> list[StoredSegment]:
        """Return the segments. Raises ConfigError if the prefix has none, and StoreError."""
        segments = await list_segments(self.store, self.prefix)
        if self.prefix and not segments:
            raise ConfigError(f"{self.label}: nothing is stored under this name")
        return segments


def split_part(text: str) -> tuple[str, str]:
    """Return the store and the prefix of a STORE#PREFIX. The name of an object stands for all of its segment."""
    name, is_part, prefix = (text, "", "") if Path(text).is_dir() else text.partition("#")
    if is_part and not prefix:  # it would be the whole store
        raise ConfigError(f"{text!r} names no part: expected the start of objects' names after the #")
    with contextlib.suppress(FormatError):
        prefix = parse_object_name(prefix).segment.stem
    return name, prefix


def run_on_part(text: str, access: StoreAccess, work: Callable[[StorePart], Awaitable[T]], **options: Any) -> T:
    """Do as `run_on_store` for a STORE#PREFIX."""
    name, prefix = split_part(text)
    return run_on_store(name, access, lambda store: work(StorePart(store, name, prefix)), **options)
