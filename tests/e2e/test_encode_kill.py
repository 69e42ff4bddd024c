"""``kvfetch encode --watch``, killed again and again while others write and read: nobody notices, nothing is lost.

``KVFETCH_ENCODE_KILLS=50`` kills it more often (three minutes or so).
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, until
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.plane.write.writer import commit_segment
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.types import KVGeometry
from tests.segments import make_segment, make_values
from tests.tools.test_transcode import decoded_equal

NUM_KILLS = int(os.environ.get("KVFETCH_ENCODE_KILLS", "10"))  # the tenth leaves old data, however slow all is
NUM_SEGMENTS = max(20, NUM_KILLS)
NUM_AT_FIRST = 5
NUM_PAGES = 8
NUM_READERS = 3
GRACE_S = 3.0  # readers here hold what a lookup told them for a third of it
GEOMETRY = KVGeometry(num_layers=6, num_heads=2, k_head_dim=64, v_head_dim=64, page_size=16, dtype="bfloat16")
TARGETS = [("hevc", "240p"), ("hevc", "480p")]
LIVES_AT_MOST_S = 20.0  # where the step does not come: there may be nothing left to do
ARGUMENTS = ["--resolutions", "240p,480p", "--workers", "1"]


def make_coded(index: int) -> CodedSegment:
    values, quantiser = make_values(GEOMETRY, NUM_PAGES, seed=index), make_quantiser("uint8")
    seed = f"segment {index}"
    return make_segment(GEOMETRY, NUM_PAGES, quantiser=quantiser, span_pages=4, seed=seed, values=values)[0]


@dataclass
class World:
    """What runs beside the encoder."""

    store: HttpStore
    segments: list[CodedSegment]
    committed: list[CodedSegment] = field(default_factory=list)
    num_reads: Counter[str] = field(default_factory=Counter)  # by the codec that was read

    async def commit_next(self) -> None:
        if len(self.committed) < len(self.segments):
            coded = self.segments[len(self.committed)]
            await commit_segment(self.store, coded)
            self.committed.append(coded)

    async def read_for_ever(self, seed: int) -> None:
        """Look segments up, read them some time later, and compare all that is decoded."""
        rng = random.Random(seed)
        while True:
            coded = rng.choice(self.committed)
            began_s = asyncio.get_running_loop().time()
            found = await self.store.lookup(coded.manifest.key.namespace, coded.manifest.page_hashes)
            assert found.num_pages == NUM_PAGES, "pages that were committed are not found"
            manifest = decode_manifest(found.hits[0].manifest)
            await asyncio.sleep(rng.uniform(0, GRACE_S / 3))
            data = await self.store.get(manifest.data_name(manifest.variants[0]))
            is_late = asyncio.get_running_loop().time() - began_s > GRACE_S / 1.5
            if is_late and data is None:
                continue  # the machine was so slow that the encoder was free to delete what was found
            assert data is not None
            first = msgspec.structs.replace(manifest, variants=manifest.variants[:1])
            assert await asyncio.to_thread(decoded_equal, CodedSegment(first, data), 0, coded, 0)
            self.num_reads[manifest.variants[0].codec] += 1


WATCH = "from sgl_kvfetch.tools import encode, main; encode._POLL_S = 0.2; main()"


AIMED_AT = ("list", "put", "check", "replaced", "replace")


async def live_and_die(url: str, lives_s: float, after_step: str = "list") -> None:
    """An encoder that is killed so long after it began a step for the first time, the first of all if not told."""
    arguments = ("encode", url, "--watch", "--verbose", "--grace", str(GRACE_S / 1.5), *ARGUMENTS)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", WATCH, *arguments, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    lines: list[bytes] = []
    try:
        async with asyncio.timeout(WAIT_S) as deadline:
            while line := await process.stderr.readline():
                lines.append(line)
                now = asyncio.get_running_loop().time()
                if len(lines) == 1:
                    deadline.reschedule(now + LIVES_AT_MOST_S)
                if after_step and line.startswith(f"kvfetch: {after_step} ".encode()):
                    deadline.reschedule(now + lives_s)
                    after_step = ""
        raise AssertionError(f"the encoder ended by itself: {b''.join(lines).decode()}")
    except TimeoutError:
        pass
    finally:
        process.kill()
        await process.communicate()


async def run(*arguments: str) -> bytes:
    command = [sys.executable, "-m", "sgl_kvfetch.tools", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said


@asynccontextmanager
async def closing_store(url: str) -> AsyncIterator[HttpStore]:
    store = HttpStore(url)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def readers(world: World) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(world.read_for_ever(seed)) for seed in range(NUM_READERS)]
        yield
        for task in tasks:
            task.cancel()


@pytest.mark.slow
async def test_an_encoder_killed_again_and_again(tmp_path: Path) -> None:
    rng = random.Random(3)
    torch.set_num_threads(1)
    with StoreProcess(tmp_path / "store") as server:
        async with closing_store(server.url) as store:
            world = World(store, [make_coded(index) for index in range(NUM_SEGMENTS)])
            for _ in range(NUM_AT_FIRST):
                await world.commit_next()
            async with readers(world):
                for kill in range(NUM_KILLS):
                    if kill % 3 == 0:
                        step, lives_s = AIMED_AT[kill // 3 % len(AIMED_AT)], rng.uniform(0, 0.02)
                    else:
                        step, lives_s = "list", rng.uniform(0.3, 3.0)
                    await live_and_die(server.url, lives_s, step)
                    while len(world.committed) < NUM_AT_FIRST + (NUM_SEGMENTS - NUM_AT_FIRST) * (kill + 1) // NUM_KILLS:
                        await world.commit_next()
            assert len(world.committed) == NUM_SEGMENTS

            await run("encode", server.url, "--grace", "0", *ARGUMENTS)
            again = msgspec.json.decode(await run("encode", server.url, "--grace", "0", "--json", *ARGUMENTS))
            assert (again["num_encoded"], again["num_done"], again["num_deleted"]) == (0, NUM_SEGMENTS, 0)
            report = msgspec.json.decode(await run("verify", server.url, "--json"))
            assert (report["problems"], report["orphans"]) == ([], [])
            assert report["num_segments"] == NUM_SEGMENTS
            for coded in world.segments:
                content = await store.get(coded.manifest.key.manifest_name)
                assert content is not None
                assert [(v.codec, v.resolution) for v in decode_manifest(content).variants] == TARGETS
            async with readers(world):
                await until(lambda: world.num_reads["hevc"] > 0)
    assert world.num_reads["zstd"] > 0
