"""Asks an SGLang server over HTTP: what it is, how it tokenises, what its metrics say. Measures streamed answers."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.stores.http import client_errors
from sgl_kvfetch.user_files import environment_secret, format_size

API_KEY_ENV = "SGLANG_API_KEY"
TIERS = ("device", "host", "storage")
_SAID_CHARS = 500
_FLUSH_TIMEOUT_S = 30.0
_LINE_BYTES = 1 << 20  # an event repeats all of its answer's tokens


class StreamError(Exception):
    """The server refused or aborted a request. The message holds the server's answer."""


@contextlib.asynccontextmanager
async def open_server(server: str) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without a timeout, with the API key of the environment. What goes wrong with the SGLang server
    raises StoreError, which says what to type."""
    key = environment_secret(API_KEY_ENV)
    headers = {"Authorization": f"Bearer {key}"} if key else None
    try:
        with client_errors(f"--server {server}"):
            async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
                yield session
    except StoreError as e:
        if e.reason == "refused":
            e.add_note("no SGLang server answers there: start it, or correct the host and port")
        raise


async def ask_server(session: aiohttp.ClientSession, method: str, url: str, body: dict[str, Any] | None = None) -> str:
    """Return the text of an answer. Raises ConfigError if it needs an API key, and StoreError if it is an error."""
    async with session.request(method, url, json=body) as response:
        text = await response.text()
        if response.status == 401:
            raise ConfigError(f"{url} wants an API key: give it as {API_KEY_ENV} in the environment")
        if response.status != 200:
            raise StoreError("server", f"{url} answered {response.status}: {text[:_SAID_CHARS]}")
        return text


async def server_info(session: aiohttp.ClientSession, server: str) -> dict[str, Any]:
    """Return an SGLang server's ``/server_info``. Raises ConfigError if another server answers, and as `ask_server`."""
    try:
        info = json.loads(await ask_server(session, "GET", f"{server}/server_info"))
    except (StoreError, ValueError) as e:
        raise ConfigError(f"--server {server} is no SGLang server: {e}; SGLang's port is 30000 by default") from e
    if not isinstance(info, dict) or not isinstance(size := info.get("page_size"), int) or size < 1:
        raise ConfigError(f"--server {server} is no SGLang server: its /server_info has no page_size")
    return info


async def flush_cache(session: aiohttp.ClientSession, server: str) -> None:
    """Empty the caches in an idle server's memory. Raises as `ask_server`."""
    await ask_server(session, "POST", f"{server}/flush_cache?timeout={_FLUSH_TIMEOUT_S:g}")


async def tokenise_on(session: aiohttp.ClientSession, server: str, text: str) -> list[int]:
    """Return the tokens that the server's tokenizer makes of a text."""
    return list(json.loads(await ask_server(session, "POST", f"{server}/tokenize", {"prompt": text}))["tokens"])


async def text_on(session: aiohttp.ClientSession, server: str, tokens: Sequence[int]) -> str:
    """Return the text that the server's tokenizer makes of tokens."""
    body = {"tokens": list(tokens), "skip_special_tokens": False}
    return str(json.loads(await ask_server(session, "POST", f"{server}/detokenize", body))["text"])


async def server_samples(session: aiohttp.ClientSession, server: str) -> list[Sample]:
    """Return what a server's ``/metrics`` has; nothing if the server has no metrics."""
    async with session.get(f"{server}/metrics") as response:
        return samples_of(await response.text()) if response.status == 200 else []


def samples_of(metrics: str) -> list[Sample]:
    """Return the samples in a text of ``/metrics``."""
    return [sample for family in text_string_to_metric_families(metrics) for sample in family.samples]


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """Return the sum of all samples with this name and these labels, over all ranks; 0 if there are none. ``name``: the
    sample's, which ends in ``_total`` for a counter."""
    return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())


def queued_text(samples: Iterable[Sample]) -> str:
    """Return how much waits in a server's write queue, as part of a sentence; "" if nothing does."""
    num_bytes = round(total(samples, "sgl_kvfetch_queued_bytes", queue="write"))
    return f"{format_size(num_bytes)} of pages wait in its write queue" if num_bytes else ""


def cached_by_tier(meta: Mapping[str, Any]) -> dict[str, int]:
    """Return how many of a prompt's tokens were not computed, by an answer's ``meta_info``."""
    details = meta.get("cached_tokens_details") or {"device": meta.get("cached_tokens", 0)}
    return {tier: details.get(tier, 0) for tier in TIERS}


def served_model(info: Mapping[str, Any]) -> str:
    """Return the name of a server's model, by its ``/server_info``."""
    return str(info.get("served_model_name") or info.get("model_path"))


@dataclass
class StreamedAnswer:
    """``ttft_s`` is the time from sending to the first token. ``itl_s`` holds the gap before each later token; tokens
    of one event share the gap before it. ``cached``: the prompt's tokens that were not computed, by tier."""

    output_ids: list[int] = field(default_factory=list)
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    itl_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached: dict[str, int] = field(default_factory=lambda: dict.fromkeys(TIERS, 0))

    @property
    def tpot_s(self) -> float | None:
        """Return the mean time per later token, or None if there is none."""
        return sum(self.itl_s) / len(self.itl_s) if self.itl_s else None

    def add(self, event: dict[str, Any], since_s: float) -> None:
        """Add a stream's event that arrived ``since_s`` after sending. Raises StreamError if the request failed."""
        if "error" in event:
            raise StreamError(f"the server answered: {json.dumps(event['error'])[:_SAID_CHARS]}")
        meta = event["meta_info"]
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise StreamError(f"the server aborted the request: {reason.get('message', reason)}"[:_SAID_CHARS])
        # An event repeats all tokens so far; with --incremental-streaming-output it carries only the new ones.
        ids, num_before = list(event["output_ids"]), len(self.output_ids)
        self.output_ids = ids if len(ids) == meta["completion_tokens"] else self.output_ids + ids
        num_new = len(self.output_ids) - num_before
        if num_new <= 0:
            return
        if num_before == 0:
            self.ttft_s = since_s
            self.itl_s = [0.0] * (num_new - 1)
        else:
            self.itl_s += [(since_s - self.e2e_s) / num_new] * num_new
        self.e2e_s = since_s
        self.prompt_tokens = meta["prompt_tokens"]
        self.cached = cached_by_tier(meta)


async def stream_generate(
    session: aiohttp.ClientSession,
    url: str,
    input_ids: Sequence[int],
    max_new_tokens: int,
    name: str | None = None,
    cache_salt: str | None = None,
) -> StreamedAnswer:
    """Generate exactly ``max_new_tokens`` tokens, greedily. ``name``, if given, becomes the server's request id.
    Requests with another ``cache_salt`` share no pages.

    Raises StreamError, aiohttp.ClientError, and TimeoutError after the session's timeout.
    """
    body: dict[str, Any] = {
        "input_ids": list(input_ids),
        "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    if name is not None:
        body["rid"] = name
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    answer = StreamedAnswer()
    started_s = time.perf_counter()
    async with session.post(f"{url}/generate", json=body, read_bufsize=_LINE_BYTES) as response:
        if response.status != 200:
            said = (await response.text())[:_SAID_CHARS]
            raise StreamError(f"status {response.status}: {said}")
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                answer.add(json.loads(data), time.perf_counter() - started_s)
    if len(answer.output_ids) != max_new_tokens:
        raise StreamError(f"the stream ended after {len(answer.output_ids)} of {max_new_tokens} tokens")
    return answer
