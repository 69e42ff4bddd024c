"""Client of a bucket of an S3-compatible store. Importing this module needs the package ``obstore``."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from sgl_kvfetch.codec import Content, bytes_of
from sgl_kvfetch.errors import ConfigError, StoreError, why
from sgl_kvfetch.keys import MANIFEST_SUFFIX, is_object_name
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores.base import (
    ObjectInfo,
    bytes_read,
    fill_pieces,
    is_namespace,
    left_of,
    object_digest,
    require_name,
)
from sgl_kvfetch.stores.http import status_error
from sgl_kvfetch.stores.notes import NoteKind
from sgl_kvfetch.stores.remote import HttpOptions, RemoteStore, environment_proxy, listing_of
from sgl_kvfetch.tls import ends_of
from sgl_kvfetch.user_files import FreshFiles

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import ClientConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")

_URL_PATH = re.compile(r"(/[A-Za-z0-9._=+-]+)*/?")
MULTIPART_BYTES = 64 << 20  # larger objects are put in parts, in parallel
PART_BYTES = 16 << 20
_PIECE_BYTES = 256 << 10  # of a read, as it arrives
_LISTED_AT_ONCE = 1000
_DELETED_AT_ONCE = 1000  # the most that one request may name
_MAX_REPLACES = 4
_NOTES = ".kvfetch-"  # and the kind: no object's names, so listings leave them out
_ENDPOINT = re.compile(r"(aws_)?endpoint(_url)?(_s3)?")  # as obstore's config and the environment call it
_WRONG_TAG = f'"{"0" * 32}"'
_PROBE = b"made to find out whether this server supports If-Match"
_NO_IF_MATCH = "the server does not support If-Match on PUT"

TagForm = Callable[[str], str]
# How servers want an ETag in If-Match: as they sent it, or (Ceph 16.2) without its quotes.
_TAG_FORMS: tuple[TagForm, ...] = (str, lambda tag: tag.strip('"'))

# obstore has one class for most errors; what happened is only in the text.
_STATUS = re.compile(r"Server returned non-2xx status code: (\d{3})")
_KIND = re.compile(r"\bkind: (Connect|Timeout|Interrupted)\b")
_DEBUG = "\n\nDebug source"
# Without credentials, obstore asks the machine's metadata service for its role's.
_OF_METADATA = re.compile(r"Error performing \w+ \S+/latest/(api/token|meta-data/)")
_BAD_CERTIFICATE = re.compile(r"\bInvalidCertificate\(")


class S3Store(RemoteStore):
    """Objects under a prefix of a bucket. obstore has the connections, credentials and retries.

    Lookups find segments by their names: see `by_name` for what that misses.
    """

    def __init__(
        self, url: str, *, options: HttpOptions | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        """``config`` has obstore's keys for S3; the environment (``AWS_*``) has defaults. Raises ConfigError.

        ``options.on_retry`` is not called: obstore does not tell of its retries.
        """
        super().__init__(url, options)
        ca = self.options.tls.ca if self.options.tls is not None else None
        self._client = FreshFiles("CAs", () if ca is None else (ca,), partial(self._open, config or {}))
        self._free = asyncio.Semaphore(self.options.max_connections)  # for all but reads, as with the HTTP store
        self._probing = asyncio.Lock()
        self._has_probed = False
        self._tag_form: TagForm | None = None  # None if the server does not support If-Match

    def _open(self, config: Mapping[str, Any]) -> obstore.store.S3Store:
        """Make a client, which has read the CA's file. Raises ConfigError."""
        bucket, prefix = _parse_url(self.url)
        try:
            return obstore.store.S3Store(
                bucket,
                prefix=prefix or None,
                config=cast(Any, dict(config)),
                client_options=_client_options(self.options, _endpoint_scheme(config)),
                retry_config={
                    "max_retries": self.options.max_attempts - 1,
                    "retry_timeout": timedelta(seconds=self.options.timeout_s),
                    "backoff": {"init_backoff": timedelta(seconds=max(self.options.backoff_s, 1e-3))},
                },
            )
        except (BaseError, TypeError, ValueError) as e:
            raise ConfigError(f"{self.url}: {_text(e)}") from None  # a traceback would show credentials

    @property
    def _objects(self) -> obstore.store.S3Store:
        return self._client.value

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        """Read an object. Raises ``too_large``, too, beyond ``max_object_bytes`` or the size of a manifest."""
        assert not start or length is not None, "a range has a length"
        if length is not None:
            return await bytes_read(self, name, start, length)
        return await self._get(name, None, self._size_limit(name))

    async def _get(self, path: str, length: int | None, most: int) -> bytes | None:
        """Read an object, or its first ``length`` bytes."""
        what = f"getting {path}"

        async def get(heard: Callable[[], None]) -> bytes:
            result = await self._begin_get(path, 0, length, most)
            return b"".join([piece async for piece in _pieces(what, result, heard)])

        return await self._call(what, lambda: self._lookups.answer(what, get), length or 0)

    async def read(
        self,
        name: str,
        start: int,
        into: Sequence[memoryview],
        received: Callable[[int], None] = lambda num_bytes: None,
    ) -> bool:
        """Read a range into ``into``. Return False if there is no such object. Raises StoreError."""
        length = sum(map(len, into))
        most = self._size_limit(name, length)
        what, end = f"reading {name}", 0

        async def read(heard: Callable[[], None]) -> bool:
            nonlocal end
            if end == length:  # it was given up at the very end
                return True
            result = await self._begin_get(name, start + end, length - end, most)
            async for piece in _pieces(what, result, heard):
                begin, end = end, end + len(piece)
                fill_pieces(left_of(into, begin), piece)
                self.options.on_received(len(piece))
                received(len(piece))
            return True

        if length == 0:
            return await self._get_nothing(name, start) is not None
        return await self._call(what, lambda: self._reads.answer(what, read), length, self._free_reads) is not None

    async def _begin_get(self, name: str, start: int, length: int | None, most: int) -> GetResult:
        """Send a GET, and check the size that its answer announces: ``most`` is the limit."""
        if length is not None:
            result = await obstore.get_async(self._objects, name, options={"range": (start, start + length)})
        else:
            result = await obstore.get_async(self._objects, name)
        self._record_version(result.meta)
        first, end = result.range
        if end - first > most:
            raise StoreError("too_large", f"getting {name}: {end - first} bytes, the limit is {most}")
        if length is not None and (first, end) != (start, start + length):
            raise StoreError("truncated", f"{name}: expected {length} bytes from {start} on, found {end - first}")
        return result

    async def put(self, name: str, data: Content) -> None:
        require_name(name)
        await self._put(name, bytes_of(data))

    async def _put(self, path: str, data: bytes) -> None:
        is_large = len(data) > MULTIPART_BYTES

        async def put() -> bool:
            await obstore.put_async(self._objects, path, data, use_multipart=is_large, chunk_size=PART_BYTES)
            return True

        if await self._call(f"putting {path}", put, len(data)) is None:
            raise StoreError("protocol", f"putting {path}: the server says that there is no such object")

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        """Replace a manifest with ``If-Match``. Raises StoreError (``invalid``) if the server does not support it."""
        if not require_name(name).is_manifest:
            raise StoreError("invalid", f"{name} is not a manifest; data objects are never replaced")
        most, tag_form = self._size_limit(name), await self._require_if_match()

        async def get() -> tuple[bytes, str]:
            result = await self._begin_get(name, 0, None, most)
            content = b"".join([piece async for piece in _pieces(f"getting {name}", result)])
            return content, result.meta["e_tag"] or _WRONG_TAG

        for _ in range(_MAX_REPLACES):
            found = await self._call(f"getting {name}", get)
            if found is None or object_digest(found[0]) != expected_digest:
                return found is not None and found[0] == data
            if await self._put_if_match(name, data, tag_form(found[1])):
                return True
        raise StoreError("server", f"replacing {name}: refused {_MAX_REPLACES} times", retriable=True)

    async def require_replace(self) -> None:
        """Probe the server, the first time: put an object of our own, and replace it with right and wrong tags."""
        await self._require_if_match()

    async def _put_if_match(self, path: str, data: bytes, tag: str) -> bool:
        """Return False if the object is not the one that ``tag`` names, or others are replacing it just now."""

        async def put() -> bool:
            try:
                await obstore.put_async(self._objects, path, data, mode={"e_tag": tag}, use_multipart=False)
            except (PreconditionError, AlreadyExistsError):  # statuses 412 and 409
                return False
            return True

        return await self._call(f"replacing {path}", put, len(data)) or False

    async def _require_if_match(self) -> TagForm:
        """Find out once whether the server supports ``If-Match``: one that ignores it would overwrite blindly."""
        async with self._probing:
            if not self._has_probed:
                self._tag_form = await self._probe_if_match()
                self._has_probed = True
                if self._tag_form is None:
                    logger.warning("%s: %s; stored segments are not replaced", self.url, _NO_IF_MATCH)
        if self._tag_form is None:
            raise StoreError("invalid", f"{self.url}: {_NO_IF_MATCH}, which replacing needs")
        return self._tag_form

    async def _probe_if_match(self) -> TagForm | None:
        path = f".kvfetch-probe-{secrets.token_hex(8)}"  # no object's name: listings leave it out
        put = await self._call("probing", lambda: obstore.put_async(self._objects, path, _PROBE))
        tag = (put and put["e_tag"]) or _WRONG_TAG
        try:
            for form in _TAG_FORMS:
                if await self._put_if_match(path, _PROBE, form(_WRONG_TAG)):
                    return None
                if await self._put_if_match(path, _PROBE, form(tag)):
                    return form
        except StoreError as e:
            if e.reason != "invalid":  # as Swift answers
                raise
        finally:
            await self._call("probing", lambda: obstore.delete_async(self._objects, path))
        return None

    async def head(self, name: str) -> ObjectInfo | None:
        """Return size and time. The time is in whole seconds."""
        require_name(name)
        meta = await self._head(name)
        return None if meta is None else _info(meta)

    async def _head(self, path: str) -> ObjectMeta | None:
        meta = await self._call(f"looking at {path}", lambda: obstore.head_async(self._objects, path))
        if meta is not None:
            self._record_version(meta)
        return meta

    def _record_version(self, meta: ObjectMeta) -> None:
        """Record whether the bucket keeps versions. Where versioning is suspended, they are called ``null``."""
        self.keeps_deleted |= meta["version"] not in (None, "null")

    async def delete(self, name: str) -> bool:
        """Delete an object. S3 does not say whether there was one, so ask before: two callers may both return True."""
        require_name(name)
        return await self._delete_if_there(name)

    async def _delete_if_there(self, path: str) -> bool:
        if await self._head(path) is None:
            return False
        await self._delete(path)
        return True

    async def _delete(self, paths: str | Sequence[str], label: str = "") -> None:
        await self._call(f"deleting {label or paths}", lambda: obstore.delete_async(self._objects, paths))

    async def delete_prefix(self, prefix: str) -> int:
        names = [info.name async for info in self.list(prefix)]
        if names:
            await self._head(names[0])  # listings have no versions
        for are_manifests in (True, False):
            left = iter([name for name in names if name.endswith(MANIFEST_SUFFIX) == are_manifests])
            while some := list(islice(left, _DELETED_AT_ONCE)):
                await self._delete(some, f"{prefix!r}*")
        return len(names)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        """List objects. Each page has its own deadline. S3 lists by folder; the rest of ``prefix`` is matched here."""
        folder, slash, _ = prefix.partition("/")
        async for meta in self._list_folder(listing_of(prefix), folder if slash else None):
            if meta["path"].startswith(prefix) and is_object_name(meta["path"]):
                yield _info(meta)

    async def _list_folder(self, what: str, folder: str | None) -> AsyncIterator[ObjectMeta]:
        pages = obstore.list(self._objects, folder, chunk_size=_LISTED_AT_ONCE)
        while metas := await self._call(what, lambda: anext(pages, None)):
            for meta in metas:
                yield meta

    async def folders(self, digest: str = "") -> frozenset[str]:
        """List folders. One request lists a thousand, of all namespaces: S3 lists by whole folders."""
        found = await self._call("listing folders", lambda: obstore.list_with_delimiter_async(self._objects))
        names = [] if found is None else found["common_prefixes"]
        return frozenset(name for name in names if name.startswith(digest and f"{digest}.") and is_namespace(name))

    async def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        """List notes. Times are in whole seconds."""
        what, folder = f"listing {kind.name}", _NOTES + kind.name
        infos: list[ObjectInfo] = []
        async for meta in self._list_folder(what, folder):
            infos.append(_info(meta, len(folder) + 1))
            if len(infos) > kind.max_notes:  # and perhaps without an end
                break
        return kind.require_list(what, infos)

    async def get_note(self, kind: NoteKind, name: str, length: int | None = None) -> bytes | None:
        return await self._get(f"{_NOTES}{kind.name}/{kind.require(name, length)}", length, kind.max_bytes)

    async def put_note(self, kind: NoteKind, name: str, data: bytes) -> None:
        await self._put(f"{_NOTES}{kind.name}/{kind.require(name)}", data)

    async def delete_note(self, kind: NoteKind, name: str) -> bool:
        return await self._delete_if_there(f"{_NOTES}{kind.name}/{kind.require(name)}")

    async def close(self) -> None:
        """End all calls. obstore closes its connections when nothing refers to it any longer."""
        self._end_calls()

    async def _call(
        self,
        what: str,
        call: Callable[[], Awaitable[T]],
        num_bytes: int = 0,
        free: asyncio.Semaphore | None = None,
    ) -> T | None:
        """Return what ``call`` returns, or None if the object is missing. Raises StoreError.

        The deadline is extended for ``num_bytes`` that are to be transferred. ``free``: of connections like this.
        """
        self._require_open()
        await self._client.follow()
        with self._naming_itself():
            try:
                async with self._deadline(what, num_bytes), free or self._free:
                    return await call()
            except FileNotFoundError as e:
                if "<Code>NoSuchBucket</Code>" in str(e):
                    raise StoreError("invalid", f"{what}: there is no bucket for {self.url}") from e
                # A proxy without a backend, or an endpoint that is no S3 store, answers 404, too. HEAD has no body that
                # would tell them apart.
                if "<Code>" not in str(e) and "performing HEAD" not in str(e):
                    raise StoreError("protocol", f"{what}: status 404, but not from an S3 store: {_text(e)}") from e
                return None
            except (BaseError, ValueError) as e:  # the latter for times that Python does not have
                raise _store_error(what, e) from e


async def _pieces(
    what: str, result: GetResult, heard: Callable[[], None] = lambda: None
) -> AsyncIterator[bytes | memoryview]:
    """Yield the body of an answer. Raises StoreError unless it has as many bytes as its head has announced: a body in
    chunks may have any number. ``heard``: called for the head, and for each piece."""
    left = num_bytes = result.range[1] - result.range[0]
    heard()
    async for piece in result.stream(min_chunk_size=_PIECE_BYTES):
        heard()
        if (left := left - len(piece)) < 0:
            raise StoreError("protocol", f"{what}: more than the {num_bytes} bytes that were announced arrived")
        yield piece
    if left:
        raise StoreError("truncated", f"{what}: {left} of {num_bytes} bytes are missing", retriable=True)


def _parse_url(url: str) -> tuple[str, str]:
    """Return bucket and prefix."""
    parts = urlsplit(url)
    is_plain = parts.scheme == "s3" and not (
        parts.query or parts.fragment or "@" in parts.netloc or ":" in parts.netloc
    )
    components = parts.path.split("/")
    if not is_plain or not parts.netloc or not _URL_PATH.fullmatch(parts.path) or {".", ".."} & set(components):
        raise ConfigError(f"store URL {url!r} is not s3://BUCKET or s3://BUCKET/PREFIX")
    return parts.netloc, parts.path.strip("/")


def _endpoint_scheme(config: Mapping[str, Any]) -> str:
    """Return the scheme of the endpoint that the config or the environment names; without one, it is Amazon's."""
    settings = [*os.environ.items(), *config.items()]
    endpoints = [str(value) for key, value in settings if _ENDPOINT.fullmatch(key.lower()) and value]
    return urlsplit(endpoints[-1]).scheme if endpoints else "https"


def _client_options(options: HttpOptions, scheme: str) -> ClientConfig:
    client: ClientConfig = {
        "allow_http": True,  # only an endpoint that the user wrote as http:// is one
        "connect_timeout": timedelta(seconds=options.connect_timeout_s),
        # A call has its own deadline. This one is for the longest.
        "timeout": timedelta(seconds=options.timeout_s + options.max_object_bytes / options.min_bytes_per_s),
    }
    if proxy := environment_proxy(scheme):
        client["proxy_url"] = proxy.url
        client["proxy_excludes"] = ",".join(proxy.excluded)
    if options.tls is not None and options.tls.cert is not None:
        raise ConfigError("a client's certificate is for https:// stores; s3:// stores have credentials")
    if options.tls is not None and options.tls.ca is not None:
        try:
            client["root_certificate"] = Path(options.tls.ca).read_bytes()
            options.tls.on_ends(ends_of(None, options.tls.ca))
        except OSError as e:
            raise ConfigError(f"cannot use the TLS file {options.tls.ca}: {why(e)}") from e
    return client


def _store_error(what: str, error: Exception) -> StoreError:
    """Return obstore's error as ours. Its messages are all that tells one cause from another."""
    message, detail = f"{what}: {_text(error)}", str(error)
    if _OF_METADATA.search(detail):
        return StoreError("unauthorised", f"{what}: no credentials were given, and this machine's role has none")
    if "<Code>RequestTimeTooSkewed</Code>" in detail:
        now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        return StoreError("clock", f"{what}: S3 refuses this machine's clock, which says {now}: set it right")
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
        return StoreError("unauthorised", message)
    if _BAD_CERTIFICATE.search(detail):
        return StoreError("tls", f"{message}: the server's certificate is not trusted; SSL_CERT_FILE names its CA")
    if "InvalidContentType" in detail:
        return StoreError("tls", f"{message}: the server does not speak TLS; write its URL with http://")
    status = _STATUS.search(detail)
    if status is not None and status[1] == "416":
        return StoreError("truncated", message)
    if status is not None:
        return status_error(int(status[1]), message)
    kind = _KIND.search(detail)
    match kind and kind[1]:
        case "Connect":
            return StoreError("refused", message, retriable=True)
        case "Timeout":
            return StoreError("timeout", message, retriable=True)
        case "Interrupted":
            return StoreError("truncated", message, retriable=True)
    return StoreError("protocol", message)


def _text(error: BaseException) -> str:
    """Return what S3 says, or else obstore without its structure. No control characters are in it."""
    said = str(error).partition(_DEBUG)[0]
    if "<Code>" in said:
        found = (re.search(rf"<{tag}>(.*?)</{tag}>", said, re.DOTALL) for tag in ("Code", "Message"))
        said = ": ".join(["S3 answered", *(match[1] for match in found if match)])
    return printable(" ".join(said.split())[:500])


def _info(meta: ObjectMeta, start: int = 0) -> ObjectInfo:
    """``start``: where the name begins in the object's path."""
    return ObjectInfo(meta["path"][start:], meta["size"], meta["last_modified"].timestamp())
