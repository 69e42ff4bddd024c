"""A server that streams as SGLang does, with no model behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeServer:
    """Answers with the prompt's length, counted up. Prompts whose first token is in ``faults`` fail in that way."""

    token_s: float = 0.0
    incremental: bool = False
    faults: dict[int, str] = field(default_factory=dict)
    prompts: list[list[int]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    url: str = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["input_ids"]
        self.prompts.append(prompt)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            fault = self.faults.get(prompt[0])
            if fault == "refuse":
                return web.json_response({"error": {"message": "too long"}}, status=400)
            if fault == "hang":
                await asyncio.Event().wait()
            return await self._stream(request, prompt, body["sampling_params"]["max_new_tokens"], fault)
        finally:
            self.running -= 1

    async def _stream(
        self, request: web.Request, prompt: Sequence[int], num_tokens: int, fault: str | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = [len(prompt) + i for i in range(num_tokens)]
        for i in range(num_tokens):
            await asyncio.sleep(self.token_s)
            if fault == "cut" and i == 1:
                return response
            if fault == "abort" and i == 1:
                await response.write(event(ids[: i + 1], i + 1, prompt, {"type": "abort", "message": "out of memory"}))
                return response
            sent = ids[i : i + 1] if self.incremental else ids[: i + 1]
            data = event(sent, i + 1, prompt)
            # Two writes an event: a reader must put them together.
            await response.write(data[:9])
            await response.write(data[9:])
        await response.write(b"data: [DONE]\n\n")
        return response


def event(ids: list[int], num_tokens: int, prompt: Sequence[int], reason: dict[str, Any] | None = None) -> bytes:
    meta = {
        "prompt_tokens": len(prompt),
        "completion_tokens": num_tokens,
        "cached_tokens": 6,
        "cached_tokens_details": {"device": 3, "host": 2, "storage": 1, "storage_backend": "Fake"},
        "finish_reason": reason,
    }
    return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


@asynccontextmanager
async def fake_server(**settings: Any) -> AsyncIterator[FakeServer]:
    fake = FakeServer(**settings)
    app = web.Application()
    app.router.add_post("/generate", fake.generate)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        fake.url = f"http://{host}:{port}"
        yield fake
    finally:
        await runner.cleanup()
