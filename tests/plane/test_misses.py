"""Why a request got less than is stored is noted for that request alone, whichever of its tasks finds out."""

from __future__ import annotations

import asyncio

from harness.metrics import own_metric
from sgl_kvfetch.metrics import miss, note, noted_here


def test_each_request_has_its_own_reasons() -> None:
    async def serve(reason: str, both_begun: asyncio.Barrier) -> list[str]:
        reasons = noted_here()
        await both_begun.wait()
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.to_thread(miss, "fetch", reason))
        note("sooner")
        return reasons

    async def run() -> list[list[str]]:
        barrier = asyncio.Barrier(2)
        return list(await asyncio.gather(*(asyncio.create_task(serve(each, barrier)) for each in ("late", "timeout"))))

    before = own_metric("sgl_kvfetch_misses_total", stage="fetch", reason="late")
    assert asyncio.run(run()) == [["late", "sooner"], ["timeout", "sooner"]]
    assert own_metric("sgl_kvfetch_misses_total", stage="fetch", reason="late") == before + 1
    note("nobody's")
