"""Opens what a command works on: a store, a part of one, or files on disk.

Where a store cannot be used, its client says what was wrong, and this says what to type.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES, StoreKeys, Variant, decode_manifest
from sgl_kvfetch.errors import ConfigError, FormatError, StoreError
from sgl_kvfetch.keys import DATA_SUFFIX, MANIFEST_SUFFIX, Namespace, parse_object_name
from sgl_kvfetch.stores import PROFILES, AdminStore, ListedProfile, ObjectInfo, list_profiles, read_profile
from sgl_kvfetch.stores.upkeep import StoredSegment, list_segments
from sgl_kvfetch.tools.summary import NamespaceSummary
from sgl_kvfetch.tools.terminal import IndexedAccess, StoreAccess

if TYPE_CHECKING:
    from sgl_kvfetch.stores.upkeep import Objects

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
        case "refused" if error.url:
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


def divided_models(namespaces: Sequence[NamespaceSummary]) -> dict[str, list[str]]:
    """Return, for each model with several sets of flags, a text for each set, such as ``--page-size 16 (12 segments)``.

    A text has what differs between the sets. Models are named as in `kvfetch inspect`. Namespaces of the stages of a
    pipeline have equal flags.
    """
    readable = [(summary.namespace, summary) for summary in namespaces if summary.namespace is not None]
    readable.sort(key=lambda each: (each[0].model, -each[1].stored_bytes))
    found: dict[str, list[str]] = {}
    for identity, group in groupby(readable, key=lambda each: each[0].model):
        num_segments: dict[tuple[str, ...], int] = {}
        name = ""
        for namespace, summary in group:
            name = name or summary.model or identity
            flags = tuple(_flags(namespace, summary))
            num_segments[flags] = num_segments.get(flags, 0) + summary.num_segments
        if len(num_segments) > 1:
            common = set.intersection(*map(set, num_segments))
            found[name if name not in found else identity] = [
                f"{' '.join(flag for flag in flags if flag not in common) or 'no others'} ({_segments(count)})"
                for flags, count in num_segments.items()
            ]
    return found


def _flags(namespace: Namespace, summary: NamespaceSummary) -> Iterator[str]:
    """Yield SGLang's flags and our config keys that a namespace is made of, besides the model."""
    for part in namespace.model_dtype.split(";"):
        name, _, value = part.partition("=")
        if name == "flags":
            yield f"{summary.flags or f'flags with the digest {value}'}"
        elif value != "None":
            yield f"--{name} {value}"
    yield f"--page-size {namespace.page_size}"
    yield f"KV cache in {namespace.kv_dtype}"
    if namespace.attention not in ("mha", "mla"):
        yield namespace.attention
    yield f"quantiser {summary.quantiser or namespace.quantiser}"


def _segments(count: int) -> str:
    return "1 segment" if count == 1 else f"{count} segments"


INDEX_TIMEOUT_S = 30.0  # commands can wait longer than servers
_ADDRESS = re.compile(r"[\w.-]+:[0-9]{1,5}/?|\[[0-9a-f:]+\]:[0-9]{1,5}/?")


class _Closable(Protocol):
    async def close(self) -> None: ...


T = TypeVar("T")
C = TypeVar("C", bound=_Closable)


def store_url(text: str) -> str:
    """Return the URL of a store that the user named by its URL or its directory. Raises ConfigError for HOST:PORT."""
    return text if "://" in text else Path(require_scheme(text)).resolve().as_uri()


def require_scheme(text: str) -> str:
    """Return ``text`` if it does not look like an address without its scheme. Raises ConfigError."""
    if _ADDRESS.fullmatch(text) and not Path(text).exists():
        raise ConfigError(f"{text!r} has no scheme: type http://{text}, or https:// if it speaks TLS")
    return text


def open_existing_store(text: str, access: StoreAccess, index: str | None = None, **options: Any) -> AdminStore:
    """Open a store that the user named by its URL or its directory. ``options`` are for `open_store`.

    A directory must exist: a typo would look like an empty store. Raises ConfigError.
    """
    from sgl_kvfetch.directory import open_store
    from sgl_kvfetch.stores import HttpOptions, S3Options, takes_token

    url = store_url(text)
    if index is not None and not url.startswith("s3:"):
        raise ConfigError(f"--index is for s3:// stores; {url} has its own")
    parts = urlsplit(url)
    if parts.scheme == "file" and not Path(unquote(parts.path)).is_dir():
        raise ConfigError(
            f"{url} is not a directory; another machine's store is http://HOST:PORT or s3://BUCKET/PREFIX"
        )
    http = replace(options.pop("options", HttpOptions()), tls=access.certificate)
    s3 = S3Options(index=index, index_timeout_s=INDEX_TIMEOUT_S)
    return open_store(url, token=access.secret if takes_token(url) else None, s3=s3, options=http, **options)


def run_on_store(text: str, access: StoreAccess, work: Callable[[AdminStore], Awaitable[T]], **options: Any) -> T:
    """Open a store as `open_existing_store` does, and return what ``work`` returns for it. Raises KVFetchError."""
    index = access.index if isinstance(access, IndexedAccess) else None
    return asyncio.run(_run(lambda: open_existing_store(text, access, index, **options), work, access))


def run_on_target(text: str, access: StoreAccess, work: Callable[[OpenTarget], Awaitable[T]]) -> T:
    """Open a TARGET argument as `open_target` does, and return what ``work`` returns for it. Raises KVFetchError."""
    return asyncio.run(_run(lambda: open_target(text, access), work, access))


async def _run(open_it: Callable[[], C], work: Callable[[C], Awaitable[T]], access: StoreAccess) -> T:
    """Work on what ``open_it`` opens. A StoreError gets a note of what to type."""
    access.secret  # noqa: B018, whatever is opened, a token that cannot be read is refused
    opened = open_it()
    try:
        return await work(opened)
    except StoreError as e:
        if (note := advice(e, access.token_source)) is not None:
            e.add_note(note)
        raise
    finally:
        await opened.close()


@dataclass(frozen=True, slots=True)
class OpenTarget:
    """Objects with the name prefix ``prefix``. Messages call them ``label``.

    ``store``: the store as commands take it, or None if they are files outside one.
    """

    objects: Objects
    prefix: str
    label: str
    store: str | None

    async def list_segments(self) -> list[StoredSegment]:
        """Return the segments. Raises ConfigError if the prefix has none, and StoreError."""
        segments = await list_segments(self.objects, self.prefix)
        if self.prefix and not segments:
            raise ConfigError(f"{self.label}: nothing is stored under this name")
        return segments

    async def list_profiles(self) -> list[ListedProfile]:
        """Return the store's profiles, the newest first; none of files outside a store."""
        return await list_profiles(self.objects) if isinstance(self.objects, AdminStore) else []

    async def unusable_profiles(self, keys: StoreKeys) -> dict[str, str]:
        """Read all profiles. Return what is wrong with those that cannot be used, by name. Without a key for an
        encrypted one, only its header is read."""
        problems: dict[str, str] = {}
        if not isinstance(self.objects, AdminStore):
            return problems
        for listed in await list_profiles(self.objects):
            try:
                if listed.head is None or listed.head.header.encryption is None or keys.encryption is not None:
                    await read_profile(self.objects, listed, keys)
            except (FormatError, StoreError) as e:
                if not e.concerns_object:
                    raise
                if await self.objects.get_note(PROFILES, listed.info.name, 1) is not None:  # not withdrawn meanwhile
                    problems[listed.info.name] = str(e)
        return problems

    async def close(self) -> None:
        await self.objects.close()


def open_target(text: str, access: StoreAccess) -> OpenTarget:
    """Parse a TARGET argument and open it. Raises ConfigError, and FormatError for an invalid manifest file."""
    path = Path(text)
    if "://" not in text and path.is_file():
        return _file_at(path, access)
    store, _, prefix = (text, "", "") if "://" not in text and path.is_dir() else text.partition("#")
    if "://" not in require_scheme(store) and not Path(store).is_dir():
        raise ConfigError(f"{store!r} is neither a file, a directory nor a store's URL")
    label = f"{store_url(store)}#{prefix}" if prefix else store_url(store)
    with contextlib.suppress(FormatError):  # it may be the full name of a manifest or data
        prefix = parse_object_name(prefix).segment.stem
    return OpenTarget(open_existing_store(store, access), prefix, label, store)


def _file_at(path: Path, access: StoreAccess) -> OpenTarget:
    if path.suffix not in (MANIFEST_SUFFIX, DATA_SUFFIX):
        raise ConfigError(f"{str(path)!r} is neither a manifest (*{MANIFEST_SUFFIX}) nor data (*{DATA_SUFFIX})")
    path = path.resolve()
    try:
        stem = parse_object_name(f"{path.parent.name}/{path.name}").segment.stem
    except FormatError:
        loose = LooseSegment(path)
        return OpenTarget(loose, loose.stem, str(path), None)
    store = path.parent.parent
    return OpenTarget(open_existing_store(store.as_uri(), access), stem, str(path), str(store))


class LooseSegment:
    """Reads like a store that holds one segment.

    The data file must lie beside the manifest ``X.kvm``, under the name that the manifest gives it or as ``X.kvd``.
    """

    def __init__(self, path: Path) -> None:
        """Open the manifest or data file ``path``. Raises ConfigError, and FormatError for a bad manifest."""
        manifest_path = _manifest_path(path)
        try:
            with manifest_path.open("rb") as file:
                manifest = decode_manifest(file.read(MAX_MANIFEST_BYTES + 1))
        except OSError as e:
            raise ConfigError(f"{manifest_path}: {e.strerror}") from e
        self.stem = manifest.key.stem
        self._paths = {manifest.key.manifest_name: manifest_path}
        for data in manifest.data:
            name = manifest.data_name(data)
            choices = [manifest_path.with_name(name.rpartition("/")[2])]
            if isinstance(data, Variant):
                choices.append(manifest_path.with_suffix(DATA_SUFFIX))
            if (data_path := next((p for p in choices if p.is_file()), None)) is not None:
                self._paths[name] = data_path

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        path = self._paths.get(name)
        return None if path is None else await asyncio.to_thread(_read, path, start, length)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for name, path in self._paths.items():
            if name.startswith(prefix):
                status = await asyncio.to_thread(path.stat)
                yield ObjectInfo(name, status.st_size, status.st_mtime)

    async def close(self) -> None:
        pass


def _manifest_path(path: Path) -> Path:
    if path.suffix == MANIFEST_SUFFIX:
        return path
    same_stem = path.with_suffix(MANIFEST_SUFFIX)
    without_digest = path.with_suffix("").with_suffix(MANIFEST_SUFFIX)
    found = next((p for p in (same_stem, without_digest) if p.is_file()), None)
    if found is None:
        raise ConfigError(f"{str(path)!r} cannot be read without its manifest; expected {same_stem.name} beside it")
    return found


def _read(path: Path, start: int, length: int | None) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read() if length is None else file.read(length)
    except OSError as e:
        raise StoreError("io", f"{path}: {e.strerror}") from e
    if length is not None and len(data) < length:
        raise StoreError("truncated", f"{path}: expected {length} bytes at offset {start}, but the file ends before")
    return data
