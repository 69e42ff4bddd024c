"""Asks an SGLang server over HTTP: what it is, how it tokenises, what it answers, what its metrics say.

Its answers are not trusted: `ask_server` reads all of them, within bounds of bytes and of time, and `ask_for` decodes
them by a type. What does not fit raises StoreError.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct, structs
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError, StoreError
from sgl_kvfetch.log import one_line, printable
from sgl_kvfetch.stores.http import client_errors, read_whole
from sgl_kvfetch.user_files import environment_secret, format_size

API_KEY_ENV = "SGLANG_API_KEY"
_SAID_CHARS = 500
_FLUSH_TIMEOUT_S = 30.0
_CONNECT_S = 10.0
_MOST_BYTES = 64 << 20  # of an answer: the tokens of a prompt of millions
ANSWER_S = 120.0  # for all that an answer takes, unless the server has to compute a prompt
COMPUTING_S = 3600.0

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0)]
LogProb = Annotated[float, Meta(ge=-1e6, le=1e-3)]  # of rounding; msgspec takes neither null nor NaN for a number


class Cached(Struct):
    """Tokens that were not computed, by tier."""

    device: Count = 0
    host: Count = 0
    storage: Count = 0


class PromptMeta(Struct):
    """What SGLang says of an answer: ``meta_info``. Log probabilities come as [logprob, token, text]."""

    id: str = ""
    cached_tokens: Count = 0
    cached_tokens_details: Cached | None = None
    output_token_logprobs: list[tuple[LogProb, int, Any]] = []
    output_top_logprobs: list[list[tuple[LogProb, int, Any]]] = []

    @property
    def by_tier(self) -> dict[str, int]:
        """How many of the prompt's tokens were not computed."""
        return structs.asdict(self.cached_tokens_details or Cached(device=self.cached_tokens))


class _Generated(Struct):
    meta_info: PromptMeta


class _Tokens(Struct):
    tokens: list[int]


@contextlib.asynccontextmanager
async def open_server(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session with the API key of the environment. What goes wrong with the SGLang server raises StoreError,
    which says what to type."""
    key = environment_secret(API_KEY_ENV)
    headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)  # `ask_server` has those of answers
    try:
        with client_errors(f"--server {server}"):
            async with aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False) as session:
                yield session
    except StoreError as e:
        if e.reason == "refused":
            e.add_note("no SGLang server answers there: start it, or correct the host and port")
        raise


async def ask_server(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = ANSWER_S,
) -> bytes:
    """Return an answer's body. Raises ConfigError if it needs an API key, and StoreError if it is an error, too large,
    or not there after ``timeout_s``."""
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.request(method, url, json=body, allow_redirects=False) as response,
        ):
            content = await read_whole(response, _MOST_BYTES)
    except TimeoutError as e:
        raise StoreError("timeout", f"{url}: no whole answer within {timeout_s:g} s") from e
    if response.status == 401:
        raise ConfigError(f"{url} wants an API key: give it as {API_KEY_ENV} in the environment")
    if response.status != 200:
        said = printable(content[: 4 * _SAID_CHARS].decode("utf-8", "replace")[:_SAID_CHARS])
        raise StoreError("server", f"{url} answered {response.status}: {said}")
    return content


async def ask_for(
    kind: type[T],
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = ANSWER_S,
) -> T:
    """Return an answer in JSON as ``kind``. Raises StoreError (``protocol``) if it is none, and as `ask_server`."""
    content = await ask_server(session, method, url, body, timeout_s)
    try:
        return msgspec.json.decode(content, type=kind)
    except DECODE_ERRORS as e:
        raise StoreError("protocol", f"{url}: the answer is malformed: {one_line(e)}") from None  # it may be secret


async def server_info(session: aiohttp.ClientSession, server: str) -> dict[str, Any]:
    """Return an SGLang server's ``/server_info``. Raises ConfigError if another server answers, and as `ask_server`."""
    try:
        info = await ask_for(dict[str, Any], session, "GET", f"{server}/server_info")
    except StoreError as e:
        raise ConfigError(f"--server {server} is no SGLang server: {e}; SGLang's port is 30000 by default") from e
    if not isinstance(size := info.get("page_size"), int) or size < 1:
        raise ConfigError(f"--server {server} is no SGLang server: its /server_info has no page_size")
    return info


async def flush_cache(session: aiohttp.ClientSession, server: str) -> None:
    """Empty the caches in an idle server's memory. Raises as `ask_server`."""
    await ask_server(session, "POST", f"{server}/flush_cache?timeout={_FLUSH_TIMEOUT_S:g}")


async def tokenise_on(session: aiohttp.ClientSession, server: str, text: str) -> list[int]:
    """Return the tokens that the server's tokenizer makes of a text."""
    return (await ask_for(_Tokens, session, "POST", f"{server}/tokenize", {"prompt": text})).tokens


async def generate(
    session: aiohttp.ClientSession,
    server: str,
    tokens: Sequence[int],
    max_new_tokens: int,
    cache_salt: str | None = None,
    **options: Any,
) -> PromptMeta:
    """Generate exactly so many tokens, greedily, and return the answer's ``meta_info``. Requests with another
    ``cache_salt`` share no pages. Raises as `ask_for`."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": sampling, **options}
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    return (await ask_for(_Generated, session, "POST", f"{server}/generate", body | salt, COMPUTING_S)).meta_info


async def server_samples(session: aiohttp.ClientSession, server: str) -> list[Sample]:
    """Return what a server's ``/metrics`` has; nothing if the server has no metrics. Raises as `ask_for`."""
    try:
        text = (await ask_server(session, "GET", f"{server}/metrics")).decode("utf-8", "replace")
    except StoreError as e:
        if e.reason == "server":
            return []
        raise
    try:
        return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as e:
        raise StoreError("protocol", f"{server}/metrics: the answer is malformed: {one_line(e)}") from None


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels, over all ranks; 0 if there are none. ``name``: the
    sample's, which ends in ``_total`` for a counter."""
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def queued_text(samples: Iterable[Sample]) -> str:
    """Return how much waits in a server's write queue, as part of a sentence; "" if nothing does."""
    num_bytes = round(total(samples, "sgl_kvfetch_queued_bytes", queue="write"))
    return f"{format_size(num_bytes)} of pages wait in its write queue" if num_bytes else ""


def served_model(info: Mapping[str, Any]) -> str:
    """Return the name of a server's model, by its ``/server_info``."""
    return one_line(info.get("served_model_name") or info.get("model_path"))
