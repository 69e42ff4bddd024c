"""What the clients of remote stores share: options, proxies, limits, deadlines, stalls, and the breaker.

`HttpStore` and `S3Store` extend `RemoteStore`; lookups and the index in Redis have a `Breaker` each. No call outlasts
its deadline or begins once closed, and no credentials but ours are sent. So both clients read the proxy here: aiohttp
knows neither ``ALL_PROXY`` nor networks such as 10.0.0.0/8 in ``NO_PROXY``, and would take credentials from ~/.netrc,
which replace our token; obstore would ask a proxy for this machine itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from sgl_kvfetch.codec import MAX_MANIFEST_BYTES
from sgl_kvfetch.errors import ConfigError, StoreError, require_positive, why
from sgl_kvfetch.stores.base import AdminStore, require_name
from sgl_kvfetch.tls import FreshContext, OnEnds, ends_of
from sgl_kvfetch.user_files import FreshFiles, warn_if_all_may_read

# This machine; and addresses of this link, where clouds give out the credentials of a machine's role.
_NEVER = ("localhost", "127.0.0.0/8", "::1", "169.254.0.0/16")
_EVERYTHING = ("*", "0.0.0.0/0", "::/0")  # obstore takes "*" for names alone


@dataclass(frozen=True, slots=True)
class Proxy:
    url: str = field(repr=False)  # may hold a user and a password
    excluded: tuple[str, ...]  # hosts, domains and networks that are reached without it

    def leads_to(self, host: str) -> bool:
        """Return whether a host is reached through this proxy."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return not any(_is_within(host.lower(), domain.lower()) for domain in self.excluded)
        return not any(address in network for network in map(_network, self.excluded) if network)


def environment_proxy(scheme: str) -> Proxy | None:
    """Return the proxy that the environment names for URLs of this scheme: HTTP_PROXY or HTTPS_PROXY, or else
    ALL_PROXY. Names may be in lower case. Raises ConfigError for a proxy of another kind."""
    proxies: Mapping[str, str] = getproxies_environment()
    name = scheme if scheme in proxies else "all"
    if name not in proxies:
        return None
    url = proxies[name] if "://" in proxies[name] else f"http://{proxies[name]}"
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(
            f"{name.upper()}_PROXY in the environment is a {urlsplit(url).scheme}:// proxy; expected http:// or "
            "https://. NO_PROXY lists the hosts that are reached without it"
        )
    excluded = tuple(entry for each in proxies.get("no", "").split(",") if (entry := each.strip()))
    return Proxy(url, _NEVER + (_EVERYTHING if "*" in excluded else excluded))


def _is_within(host: str, domain: str) -> bool:
    domain = domain.removeprefix(".")
    return domain == "*" or host == domain or host.endswith(f".{domain}")


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    """Return the addresses that an entry of NO_PROXY means; None for a name."""
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


T = TypeVar("T")

Token: TypeAlias = "str | FreshFiles[str]"
"""A store's bearer token, or its file, which may be replaced at any time."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for ``https://``, which may be replaced at any time."""

    ca: str | None = None  # CAs that may have signed the server's certificate; by default the system's
    cert: str | None = None  # our own certificate, for servers that demand one
    key: str | None = None  # its key, if it is not in the same file
    on_ends: OnEnds = lambda ends: None

    def context(self) -> FreshContext:
        """Load the files. Raises ConfigError if one cannot be read or has no certificate."""
        ca = self.ca or ssl.get_default_verify_paths().cafile
        return FreshContext(FreshFiles("certificates", [path for path in (ca, *self._own) if path], self._read))

    @property
    def _own(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key) if path)

    def _read(self) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.cert is not None:
                warn_if_all_may_read(self.key or self.cert)
                context.load_cert_chain(self.cert, self.key, password="")  # never asks on a terminal
        except OSError as e:
            files = ", ".join(path for path in (self.ca, *self._own) if path)
            raise ConfigError(f"cannot use the TLS files {files}: {why(e)}") from e
        self.on_ends(ends_of(self.cert, self.ca))
        return context


@dataclass(frozen=True, slots=True)
class HttpOptions:
    timeout_s: float = 30.0  # for one call, including retries and the wait for a connection
    # A put, or a get of a given length, may take longer by the time that its bytes need at this speed.
    min_bytes_per_s: float = 8e6
    connect_timeout_s: float = 5.0  # for one attempt
    max_connections: int = 32  # for reads, and as many for everything else
    max_attempts: int = 4
    backoff_s: float = 0.1  # upper bound before the first retry; doubles each time; the wait is random below it
    max_object_bytes: int = 1 << 30  # the largest body that is read into memory
    silence_s: float | None = None  # see `StallWatch`
    on_retry: Callable[[StoreError], None] = lambda error: None  # called before each retry, on the event loop
    # Gets the size of each piece of a ranged read, as it comes, on the event loop.
    on_received: Callable[[int], None] = lambda num_bytes: None
    tls: TlsFiles | None = None

    def __post_init__(self) -> None:
        require_positive(self, "timeout_s", "min_bytes_per_s", "connect_timeout_s")
        require_positive(self, "max_connections", "max_attempts", "max_object_bytes")
        if self.silence_s is not None:
            require_positive(self, "silence_s")
        if self.backoff_s < 0:
            raise ConfigError(f"backoff_s is {self.backoff_s}; expected 0 or more")


def listing_of(prefix: str) -> str:
    """Return what messages call a listing."""
    return f"listing {prefix!r}" if prefix else "listing everything"


class RemoteStore(AdminStore):
    """Base of clients that reach their store over a network."""

    def __init__(self, url: str, options: HttpOptions | None) -> None:
        self.url = url.rstrip("/")
        self.options = options or HttpOptions()
        self._closed = False
        self._limits: set[asyncio.Timeout] = set()  # of the calls under way
        self._free_reads = asyncio.Semaphore(self.options.max_connections)
        self._reads, self._lookups = (StallWatch(self.options.silence_s, self.options.on_retry) for _ in range(2))

    def _require_open(self) -> None:
        if self._closed:
            raise StoreError("io", f"the client of {self.url} is closed")

    def _size_limit(self, name: str, num_bytes: int = 0) -> int:
        """Return the most bytes that an object may have. Raises ``too_large`` if ``num_bytes`` are more."""
        most = MAX_MANIFEST_BYTES if require_name(name).is_manifest else self.options.max_object_bytes
        if num_bytes > most:
            raise StoreError("too_large", f"getting {name}: {num_bytes} bytes, the limit is {most}")
        return most

    async def _get_nothing(self, name: str, start: int) -> bytes | None:
        """Return the result of a `get` of no bytes, which HTTP cannot ask for. Raises ``truncated`` behind the end."""
        info = await self.head(name)
        if info is not None and start > info.size_bytes:
            raise StoreError("truncated", f"{name} has {info.size_bytes} bytes; cannot read from byte {start} on")
        return None if info is None else b""

    @contextmanager
    def _naming_itself(self) -> Iterator[None]:
        """Note this store's URL in each StoreError that passes."""
        try:
            yield
        except StoreError as e:
            e.url = self.url
            raise

    @asynccontextmanager
    async def _deadline(self, what: str, num_bytes: int = 0) -> AsyncIterator[float]:
        """Raise ``timeout`` after ``timeout_s``, extended for ``num_bytes`` that are to be transferred, and ``io`` once
        the client is closed.

        Yield the time in seconds.
        """
        timeout_s = self.options.timeout_s + num_bytes / self.options.min_bytes_per_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                self._limits.add(limit)
                yield timeout_s
        except TimeoutError as e:
            self._require_open()
            message = f"{what}: no answer from {self.url} within {timeout_s:g} s"
            raise StoreError("timeout", message, retriable=True) from e
        except RuntimeError:  # as aiohttp says that it would read on from a connection that `close` has closed
            self._require_open()
            raise
        finally:
            self._limits.discard(limit)

    def _end_calls(self) -> None:
        """Let no further call begin, and end those under way."""
        self._closed = True
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0)


class StallWatch:
    """Asks again, over another connection, when an answer stalls.

    One connection that hangs makes a whole prompt late, since a prefix counts only up to its first missing page. So an
    answer of which nothing comes for a while is given up, and asked for again, from the byte on at which it stopped.

    That must not make things worse: a store that is slow because it is overloaded would get each request several times.
    So a while is at least twice as long as the answers that came were silent lately, and doubles with each further
    request for the same answer. Connections that hang bring no answers, and so change nothing for others.
    """

    _MOST_S = 8.0
    _KEPT = 0.98  # of the longest silence, with each answer that was silent for less

    def __init__(self, silence_s: float | None, on_break: Callable[[StoreError], None]) -> None:
        """``silence_s``: how long nothing may come, at least; None to wait for ever. ``on_break``: called before it
        asks again."""
        self._least_s = silence_s
        self._usual_s = 0.0  # the longest silence of recent answers
        self._on_break = on_break

    async def answer(self, what: str, ask: Callable[[Callable[[], None]], Awaitable[T]]) -> T:
        """Return what ``ask`` returns. It calls its argument whenever something has come. It must have a connection,
        or get one at once: to wait for one is silence. ``what`` is for messages."""
        if self._least_s is None:
            return await ask(lambda: None)
        limit_s, now = max(self._least_s, 2 * self._usual_s), asyncio.get_running_loop().time
        while True:
            limit_s = min(limit_s, self._MOST_S)
            try:
                async with asyncio.timeout(limit_s) as limit:
                    silence = _Silence(limit, limit_s, now())
                    answer = await ask(silence.end)
                    silence.end()
            except TimeoutError:
                if not limit.expired():
                    raise
                self._on_break(StoreError("timeout", f"{what}: nothing came for {limit_s:g} s", retriable=True))
                limit_s *= 2
            else:
                self._usual_s = max(silence.longest_s, self._KEPT * self._usual_s)
                return answer


@dataclass(slots=True)
class _Silence:
    """The silence of one answer, whose ``limit`` is ``limit_s`` after it began."""

    limit: asyncio.Timeout
    limit_s: float
    began_s: float
    longest_s: float = 0.0

    def end(self) -> None:
        """Record that something has come. The next silence begins."""
        if not self.limit.expired():
            now_s = asyncio.get_running_loop().time()
            self.longest_s = max(self.longest_s, now_s - self.began_s)
            self.began_s = now_s
            self.limit.reschedule(now_s + self.limit_s)


class Breaker:
    """A circuit breaker: skips a store that keeps failing, so that its outage does not delay requests.

    Opens after ``threshold`` failures in a row, for a pause that doubles with each further failure. Callers pass
    the current time in seconds."""

    def __init__(self, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 30.0) -> None:
        self._threshold = threshold
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self.succeeded()

    def is_open(self, now_s: float) -> bool:
        return now_s < self._open_until_s

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_until_s = float("-inf")

    def failed(self, now_s: float) -> None:
        self._num_failures += 1
        over = self._num_failures - self._threshold
        if over >= 0:
            self._open_until_s = now_s + min(self._longest_pause_s, self._first_pause_s * 2.0 ** min(over, 30))
