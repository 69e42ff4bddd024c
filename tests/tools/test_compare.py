"""`kvfetch compare` without a server: divergences of what is known, and what it refuses. tests/e2e/test_commands.py has
servers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.tools import sglang_server
from sgl_kvfetch.tools.compare import TopAnswer, ask, compared, divergence
from sgl_kvfetch.tools.sglang_server import ask_server, open_server, server_info, server_samples


def likeliest(logprobs: torch.Tensor, count: int) -> dict[int, float]:
    values, tokens = logprobs.topk(count)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


@pytest.mark.parametrize(("spread", "sharp"), [(0.01, 3.0), (3.0, 0.5)])
def test_a_divergence_is_a_lower_bound_that_gets_closer_with_each_known_token(spread: float, sharp: float) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        logits = sharp * torch.randn(200, dtype=torch.float64)
        p = logits.log_softmax(0)
        q = (logits + spread * torch.randn(200, dtype=torch.float64)).log_softmax(0)
        exact = float((p.exp() * (p - q)).sum())
        found = [divergence(likeliest(p, count), likeliest(q, count)) for count in (1, 20, 100, 200)]
        assert found[-1] == pytest.approx(exact, rel=1e-3, abs=1e-4)
        assert all(0 <= each <= exact + 1e-4 for each in found)
    assert divergence(likeliest(p, 20), likeliest(p, 20)) == pytest.approx(0, abs=1e-6)


def test_answers_are_compared_up_to_the_first_token_that_differs() -> None:
    tops = [{1: math.log(0.9)}] * 4
    computed = TopAnswer([1, 1, 1, 1], tops, {})
    assert len(compared(computed, computed)) == 4
    assert len(compared(computed, TopAnswer([1, 2, 1, 1], tops, {}))) == 2


@asynccontextmanager
async def answering(body: Callable[[], bytes | AsyncIterator[bytes]]) -> AsyncIterator[str]:
    """A server that gives this answer to everything."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=body())

    async with RawTestServer(handle) as server:
        yield f"http://127.0.0.1:{server.port}"


@pytest.mark.parametrize("answer_bytes", [1 << 17, None])
async def test_an_answer_is_read_up_to_a_bound(answer_bytes: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its length is announced, or it never ends."""
    monkeypatch.setattr(sglang_server, "_MOST_BYTES", 1 << 16)
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield bytes(1 << 16)

    async with answering(lambda: endless() if answer_bytes is None else bytes(answer_bytes)) as url:
        async with open_server(url) as session:
            with pytest.raises(StoreError) as caught:
                await ask_server(session, "GET", url)
        assert caught.value.reason == "too_large"
        for ask in (server_info, server_samples):
            with pytest.raises((ConfigError, StoreError), match=r"limit (is|of)"):
                async with open_server(url) as session:
                    await ask(session, url)
    assert sent < 64 << 20  # what sockets hold


async def test_an_answer_that_does_not_end_has_a_deadline() -> None:
    async def slow() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await asyncio.sleep(0.01)

    async with answering(slow) as url, open_server(url) as session:
        with pytest.raises(StoreError) as caught:
            await ask_server(session, "GET", url, timeout_s=0.2)
        assert caught.value.reason == "timeout"


def of_a_token(logprob: str) -> str:
    return f'"output_token_logprobs": [[{logprob}, 1, null]], "output_top_logprobs": [[[{logprob}, 1, null]]]'


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        *((of_a_token(logprob), "the answer is malformed") for logprob in ('"x"', "NaN", "null", "1e308")),
        ("", "expected 16 of each"),
        ('"output_token_logprobs": [[-1, 1, null]]', "expected 16 of each"),
    ],
)
async def test_malformed_and_missing_log_probabilities_are_named(meta: str, said: str) -> None:
    answer = f'{{"meta_info": {{{meta}}}}}'
    async with answering(answer.encode) as url, open_server(url) as session:
        with pytest.raises(StoreError, match=said) as caught:
            await ask(session, url, [1, 2], None)
        assert caught.value.reason == "protocol"
