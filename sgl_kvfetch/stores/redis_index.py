"""The index of pages in Redis or Valkey, for stores that find objects only by name. It needs the package ``redis``.

For each page, it has the longest stored segment that holds the page. Segments are buddies: of those that hold a page,
a longer one starts earlier or at the same page, so this is the one that `base` looks for. The index is a hint, and
never trusted: readers compare the manifests that it leads to with the hashes of their pages.

A key is ``kvf1:{TAG}DIGEST``: the digest of the store's URL, the folder and the page's hash. Its tag is the first of
its bytes, in hexadecimal: clusters keep the keys of a tag together, so that a lookup has at most 256 parts. A value is
an `Entry`. Beside them are when segments were last used, under digests of their names, and the sweeper's lease.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import struct
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

import redis.asyncio
import redis.exceptions
import xxhash
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sgl_kvfetch.codec import MAX_SEGMENT_PAGES, Manifest
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, SegmentKey
from sgl_kvfetch.stores.remote import Breaker
from sgl_kvfetch.user_files import environment_secret

PASSWORD_ENV = "KVFETCH_INDEX_PASSWORD"
_SCHEMES = ("redis", "rediss", "redis+cluster", "rediss+cluster")

_DIGEST_BYTES = 16
_ENTRY = struct.Struct(f">QB{PAGE_HASH_BYTES}s")  # 41 bytes; Redis keeps up to 44 in one allocation
_ORDER_AT = 9  # where Lua, which counts from 1, finds the order in an entry

# Scripts over all KEYS. Each reads with `_VALUE`, which ends the script with the error if the server refuses the read:
# only what the server says is missing counts as missing. A value that is not a string, which only others can have put
# there, counts as missing, too.
_VALUE = """
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then
    if not value.err or not value.err:find('WRONGTYPE', 1, true) then return value end
    value = false
  end
"""
_READ = f"""
local found = {{}}
for i, key in ipairs(KEYS) do
{_VALUE}
  found[i] = value
end
return found
"""
_READ_AND_KEEP = _READ.replace("'GET', key", "'GETEX', key, 'EX', ARGV[1]")
# Keep the entry of a longer segment. Replace any other value, garbage included.
_SET = f"""
for i, key in ipairs(KEYS) do
{_VALUE}
  local new = ARGV[i + 1]
  if not value or #value ~= #new or value:byte({_ORDER_AT}) <= new:byte({_ORDER_AT}) then
    redis.call('SET', key, new, 'EX', ARGV[1])
  end
end
"""
_DELETE = f"""
for i, key in ipairs(KEYS) do
{_VALUE}
  if value == ARGV[i + 1] then redis.call('DEL', key) end
end
"""
_PUT = """
for i, key in ipairs(KEYS) do redis.call('SET', key, ARGV[i + 1], 'EX', ARGV[1]) end
"""
# Take the lease if nobody has it, or keep it. The second argument is its holder. If another one has it, return for how
# long, in milliseconds below zero.
_HOLD = f"""
for i, key in ipairs(KEYS) do
{_VALUE}
  if value and value ~= ARGV[2] then return -math.max(1, redis.call('PTTL', key)) end
  redis.call('SET', key, ARGV[2], 'EX', ARGV[1])
end
return 1
"""
_LEASE_S = 30
_KEYS_AT_ONCE = 512  # in a script, which nothing else can interrupt
_USES_AT_ONCE = 16 * _KEYS_AT_ONCE  # in a round trip


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a page is: its position in the sequence, and the segment that holds it."""

    position: int
    order: int  # the segment has 2 ** order pages
    last_page_hash: bytes  # of the segment

    @property
    def first_page(self) -> int:
        """The segment's position, which is aligned to its length."""
        return self.position >> self.order << self.order

    def key(self, folder: str) -> SegmentKey:
        return SegmentKey(folder, 1 << self.order, self.last_page_hash)

    def encode(self) -> bytes:
        return _ENTRY.pack(self.position, self.order, self.last_page_hash)


def decode_entry(value: object) -> Entry | None:
    """Return None for anything but an entry."""
    if not isinstance(value, bytes) or len(value) != _ENTRY.size:
        return None
    entry = Entry(*_ENTRY.unpack(value))
    return entry if 1 << entry.order <= MAX_SEGMENT_PAGES else None


def entries_of(manifest: Manifest) -> dict[bytes, Entry]:
    """Return the entries of a segment's pages, by page hash."""
    order, last = manifest.num_pages.bit_length() - 1, manifest.page_hashes[-1]
    pages = enumerate(manifest.page_hashes, manifest.first_page)
    return {page_hash: Entry(position, order, last) for position, page_hash in pages}


@dataclass(frozen=True, slots=True)
class IndexOptions:
    url: str = field(
        repr=False
    )  # redis://HOST:PORT/DB, rediss:// with TLS; redis+cluster:// and rediss+cluster:// for clusters
    ttl_s: float = 7 * 86400.0  # an entry that no lookup asks for is gone after this time
    timeout_s: float = 0.5  # for one call
    on_failure: Callable[[StoreError], None] = lambda error: None

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            is_good = parts.scheme in _SCHEMES and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            is_good = False
        if not is_good or not (parts.path.strip("/") or "0").isdecimal() or parts.query or parts.fragment:
            raise ConfigError(
                "the index's URL is not redis://HOST:PORT/DB, rediss://..., redis+cluster://... or rediss+cluster://..."
            )
        if parts.scheme.endswith("+cluster") and parts.path.strip("/"):
            raise ConfigError("the index's URL names a database; a cluster has only one")

    @property
    def label(self) -> str:
        """The URL without user and password."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


class PageIndex:
    """Client of the index. The first call connects, on the event loop of that call.

    All methods raise StoreError. After three failures in a row they do so at once, for 1 to 30 s (``skipped``).

    Redis's client connects anew and asks once more if a connection breaks, or leads to a replica: after a failover, the
    old primary may live on as one, and keep our connections. After a failure, no connection is kept: the URL may lead
    to another server by then.
    """

    def __init__(self, options: IndexOptions, store_url: str) -> None:
        """``store_url`` tells the pages of several stores in one index apart."""
        self.options = options
        self._scope = f"{store_url}\n".encode()
        self._is_cluster = "+cluster:" in options.url
        self._breaker = Breaker()
        self._client: Any = None

    async def find(self, folder: str, page_hashes: Sequence[bytes]) -> list[Entry | None]:
        """Return what is known of each page, and keep that for another TTL."""
        values = await self._read("looking pages up", _READ_AND_KEEP, self._page_keys(folder, page_hashes))
        return [decode_entry(value) for value in values]

    async def add(self, manifest: Manifest) -> None:
        """Enter the pages of a stored segment. A page stays in a longer segment that it is in."""
        entries = entries_of(manifest)
        values = [entry.encode() for entry in entries.values()]
        await self._run("entering pages", _SET, self._page_keys(manifest.heads.folder, list(entries)), values)

    async def remove(self, folder: str, stale: Mapping[bytes, Entry]) -> None:
        """Remove entries, by page hash, unless they have changed."""
        entries = [entry.encode() for entry in stale.values()]
        await self._run("removing pages", _DELETE, self._page_keys(folder, list(stale)), entries)

    async def record_uses(self, uses: Mapping[SegmentKey, float]) -> None:
        """Record when segments were last used, in seconds since the epoch. Kept for a TTL, like pages."""
        await self._run("noting uses", _PUT, self._use_keys(list(uses)), [b"%d" % used for used in uses.values()])

    async def last_uses(self, segments: Sequence[SegmentKey]) -> list[float | None]:
        """Return when segments were last used, in seconds since the epoch; None if that is not known."""
        found: list[float | None] = []
        for first in range(0, len(segments), _USES_AT_ONCE):
            keys = self._use_keys(segments[first : first + _USES_AT_ONCE])
            values = await self._read("reading uses", _READ, keys)
            found += [float(v) if isinstance(v, bytes) and v.isdigit() else None for v in values]
        return found

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[None]:
        """Hold the lease of the store's only sweeper. The body is cancelled when the lease is lost.

        Raises StoreError: ``skipped`` if another sweeper holds the lease, or took it.
        """
        keys, holder = [self._key(b"lease")], secrets.token_hex(16).encode()

        async def hold() -> None:
            [(_, held)] = await self._run("holding the lease", _HOLD, keys, [holder], _LEASE_S)
            if held != 1:
                for_s = f"{-held / 1000:.0f} s more" if isinstance(held, int) else "some time"
                raise StoreError(
                    "skipped",
                    f"index {self.options.label}: another gc run holds the lock, or was killed: it has the lock for "
                    f"{for_s}, and longer if it still runs",
                    retriable=True,
                )

        async def keep_holding() -> None:
            while True:
                await asyncio.sleep(_LEASE_S / 6)
                await hold()

        await hold()
        try:
            async with asyncio.TaskGroup() as group:
                keeper = group.create_task(keep_holding())
                yield
                keeper.cancel()
        except ExceptionGroup as e:
            raise e.exceptions[0] from None
        finally:
            with suppress(StoreError):  # or it ends by itself
                await self._run("giving the lease back", _DELETE, keys, [holder])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _page_keys(self, folder: str, page_hashes: Sequence[bytes]) -> list[bytes]:
        return [self._key(folder.encode() + page_hash) for page_hash in page_hashes]

    def _use_keys(self, segments: Sequence[SegmentKey]) -> list[bytes]:
        return [self._key(b"use " + segment.stem.encode()) for segment in segments]

    def _key(self, what: bytes) -> bytes:
        digest = xxhash.xxh3_128_digest(self._scope + what)
        return b"kvf1:{%02x}%b" % (digest[0], digest)

    def _parts(self, keys: Sequence[bytes]) -> list[list[int]]:
        """Group keys, by their indices, into those that a script may use at once. In a cluster, they have one tag."""
        if not self._is_cluster:
            everything = range(len(keys))
            return [list(everything[i : i + _KEYS_AT_ONCE]) for i in everything[::_KEYS_AT_ONCE]]
        by_tag = defaultdict(list)
        for i, key in enumerate(keys):
            by_tag[key[:-_DIGEST_BYTES]].append(i)
        return list(by_tag.values())

    async def _read(self, what: str, script: str, keys: Sequence[bytes]) -> list[object]:
        """Run a script that returns a value for each key. Return the values in the order of the keys."""
        found: list[object] = [None] * len(keys)
        for part, values in await self._run(what, script, keys):
            if not isinstance(values, list) or len(values) != len(part):
                raise StoreError("protocol", f"index {self.options.label}: the answer is not one value per key")
            for i, value in zip(part, values, strict=True):
                found[i] = value
        return found

    async def _run(
        self, what: str, script: str, keys: Sequence[bytes], values: Sequence[bytes] = (), ttl_s: float | None = None
    ) -> list[tuple[list[int], object]]:
        """Run a script over keys in one round trip, part by part. Return the indices of each part's keys with its
        answer. The script's arguments are the TTL, by default the entries', and the ``values`` of its keys."""
        parts = self._parts(keys)
        ttl = max(1, int(self.options.ttl_s if ttl_s is None else ttl_s))
        if self._breaker.is_open(time.monotonic()):
            raise StoreError("skipped", f"{what}: the index keeps failing", retriable=True)

        client = self._connected()
        pipeline = client.pipeline(transaction=False)
        for part in parts:
            arguments = [values[i] for i in part] if values else []
            pipeline.eval(script, len(part), *(keys[i] for i in part), ttl, *arguments)
        try:
            async with asyncio.timeout(self.options.timeout_s):
                answers = cast(list[object], await pipeline.execute())
        except (redis.exceptions.RedisError, redis.exceptions.RedisClusterException, OSError, TypeError) as e:
            # TypeError is how its parser fails at a map with a list as a key. The rest of that answer must not be read.
            with suppress(redis.exceptions.RedisError):
                await client.aclose()  # its connections; the next call makes new ones
            self._breaker.failed(time.monotonic())
            error = _store_error(f"index {self.options.label}: {what}", e)
            self.options.on_failure(error)
            raise error from e
        self._breaker.succeeded()
        return list(zip(parts, answers, strict=True))

    def _connected(self) -> Any:
        if self._client is None:
            kind = redis.asyncio.RedisCluster if self._is_cluster else redis.asyncio.Redis
            self._client = cast(Any, kind).from_url(
                self.options.url.replace("+cluster", "", 1),
                password=environment_secret(PASSWORD_ENV),  # one in the URL goes before it
                socket_connect_timeout=self.options.timeout_s,
                # At once, and once: callers do without. A connection that was idle may be dead by now.
                retry=Retry(NoBackoff(), 1),
                retry_on_error=[redis.exceptions.ReadOnlyError, redis.exceptions.MasterDownError],
            )
        return self._client


_LACKS_RIGHT = re.compile(r"NOPERM|no permissions|can't (?:run this|access at least)")
_RIGHTS = (
    "the index needs ~kvf1:* +eval +get +getex +set +del, gc +pttl, a database but 0 +select, and a cluster "
    "+cluster|slots +command (docs/stores.md)"
)


def _said(error: BaseException) -> str:
    """Return what a server says. The client puts the command before it."""
    return str(error).rpartition("caused error: ")[2]


def _missing_right(error: BaseException | None) -> str | None:
    """Return what a server says that refuses a command to our user, or None. The cluster's client hides such an answer
    behind an error of its own, and within a script, it has no class."""
    while error is not None:
        if isinstance(error, redis.exceptions.NoPermissionError) or _LACKS_RIGHT.search(str(error)):
            return _said(error)
        error = error.__cause__ or error.__context__
    return None


def _store_error(what: str, error: Exception) -> StoreError:
    if (refused := _missing_right(error)) is not None:
        return StoreError("unauthorised", f"{what}: {refused}; {_RIGHTS}")
    said = _said(error)
    match error:
        case TimeoutError() | redis.exceptions.TimeoutError():
            return StoreError("timeout", f"{what}: no answer in time", retriable=True)
        case redis.exceptions.AuthenticationError():
            return StoreError("unauthorised", f"{what}: {said}")
        case redis.exceptions.OutOfMemoryError():
            return StoreError("full", f"{what}: {said}", retriable=True)
        case redis.exceptions.ConnectionError() | redis.exceptions.RedisClusterException() | OSError():
            return StoreError("refused", f"{what}: {said}", retriable=True)
    return StoreError("server", f"{what}: {said}", retriable=True)
