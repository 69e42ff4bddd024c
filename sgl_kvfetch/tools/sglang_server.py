"""Asks an SGLang server over HTTP: what it is, how it tokenises, what it answers, what its metrics say."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
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


async def generate(
    session: aiohttp.ClientSession,
    server: str,
    tokens: Sequence[int],
    max_new_tokens: int,
    cache_salt: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Generate exactly so many tokens, greedily, and return the answer's ``meta_info``. Requests with another
    ``cache_salt`` share no pages. Raises as `ask_server`."""
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": sampling, **options}
    salt = {} if cache_salt is None else {"cache_salt": cache_salt}
    answer: dict[str, Any] = json.loads(await ask_server(session, "POST", f"{server}/generate", body | salt))
    return dict(answer["meta_info"])


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
