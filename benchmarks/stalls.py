"""Measures how stalled connections, dead replicas and outages delay a fetch, with and without hedged reads.

    python -m benchmarks.stalls [--json OUT] [--repeat N]

A fetch reads one object in many parts, several at a time, with the client that SGLang's servers use, from a real store
over real sockets and a link of limited speed. A proxy injects the faults. Bytes are neither decoded nor restored.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import machine, versions
from benchmarks.report import write_json
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server import ServerConfig, running_server
from sgl_kvfetch.stores.http import HttpOptions
from sgl_kvfetch.stores.local import LocalStore
from sgl_kvfetch.stores.open import open_replicas
from sgl_kvfetch.stores.replicas import ReplicaOptions
from sgl_kvfetch.testing.faults import Fault, FaultyProxy
from sgl_kvfetch.testing.small_segments import data_object

READ_BYTES = 1 << 20
NUM_READS = 64
READS_AT_ONCE = 8
LINK_GBPS = 0.4  # for each replica
DEADLINE_S = 10.0
MAX_RACES = ReplicaOptions().max_races
FAULT_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Scene:
    """After ``after_s``, the first replica permanently gets ``fault``, or its link is dead for ``gone_s``."""

    name: str
    fault: Fault | None = None
    after_s: float = 0.0
    gone_s: float = 0.0
    num_replicas: int = 1


_HALFWAY = READ_BYTES // 2
SCENES = (
    Scene("nothing happens"),
    Scene("a connection hangs", Fault("hang", times=1), FAULT_AFTER_S),
    Scene("a connection stalls in mid-body", Fault("stall", after_bytes=_HALFWAY, times=1), FAULT_AFTER_S),
    Scene("one of two replicas refuses from the start", Fault("refuse"), num_replicas=2),
    Scene("one of two replicas hangs from the start", Fault("hang"), num_replicas=2),
    Scene(
        "one of two replicas stalls in mid-fetch", Fault("stall", after_bytes=_HALFWAY), FAULT_AFTER_S, num_replicas=2
    ),
    Scene("the link is at zero for 3 s", after_s=FAULT_AFTER_S, gone_s=3.0),
)


@dataclass(frozen=True, slots=True)
class Fetch:
    duration_s: float
    reads_done: int  # how many of NUM_READS, within the deadline
    requests: int  # how many reached the proxies
    races: dict[str, int]  # number of hedged reads, by result


async def run_fetch(scene: Scene, max_races: int, folder: Path) -> Fetch:
    """Run one fetch. ``max_races``: most hedged reads at a time, 0 for none. ``folder`` is filled if it is empty."""
    content = random.Random(0).randbytes(NUM_READS * READ_BYTES)
    name = data_object(content)
    filling = LocalStore(folder)
    if await filling.head(name) is None:
        await filling.put(name, content)
    await filling.close()
    loop = asyncio.get_running_loop()
    races: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        proxies = []
        for _ in range(scene.num_replicas):
            # The object has no manifest, but must not be collected as an orphan.
            config = ServerConfig(folder, port=0, link_gbps=LINK_GBPS, orphan_age_s=86400.0)
            server = await stack.enter_async_context(running_server(config))
            proxies.append(await stack.enter_async_context(FaultyProxy(server.host, server.port)))
        store = open_replicas(
            [proxy.url for proxy in proxies],
            options=HttpOptions(timeout_s=DEADLINE_S, max_connections=READS_AT_ONCE),
            replicas=ReplicaOptions(max_races=max_races, on_race=lambda _, result: races.update([result])),
        )
        stack.push_async_callback(store.close)

        async def read(idx: int) -> None:
            assert await store.get(name, idx * READ_BYTES, READ_BYTES) is not None

        began_s = loop.time()
        fault = loop.create_task(_befall(scene, proxies[0]))
        reads = [loop.create_task(read(idx)) for idx in range(NUM_READS)]
        await asyncio.wait(reads, timeout=DEADLINE_S)
        duration_s = loop.time() - began_s
        for task in (fault, *reads):
            task.cancel()
        ended = await asyncio.gather(*reads, return_exceptions=True)
        _raise_unexpected(ended)
        return Fetch(duration_s, ended.count(None), sum(len(proxy.requests) for proxy in proxies), dict(races))


def _raise_unexpected(ended: Sequence[BaseException | None]) -> None:
    for error in ended:
        if error is not None and not isinstance(error, asyncio.CancelledError | StoreError):
            raise error


async def _befall(scene: Scene, proxy: FaultyProxy) -> None:
    await asyncio.sleep(scene.after_s)
    if scene.fault is not None:
        await proxy.set(scene.fault)
    elif scene.gone_s:
        proxy.cut()
        await asyncio.sleep(scene.gone_s)
        proxy.mend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeat", type=int, default=3, help="fetches of each kind, in turn (default 3)")
    options = parser.parse_args()
    table = Table("scene", "without, s", "reads", "with, s", "reads", "requests", "races")
    scenes = []
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            pairs = [
                [asyncio.run(run_fetch(scene, max_races, Path(folder))) for max_races in (0, MAX_RACES)]
                for _ in range(options.repeat)
            ]
            without, raced = ([pair[i] for pair in pairs] for i in (0, 1))
            scenes.append(
                {"name": scene.name, "without": [asdict(f) for f in without], "raced": [asdict(f) for f in raced]}
            )
            table.add_row(
                scene.name,
                *(_median(without), str(min(fetch.reads_done for fetch in without))),
                *(_median(raced), str(min(fetch.reads_done for fetch in raced))),
                str(max(fetch.requests for fetch in raced)),
                str(raced[-1].races or ""),
            )
    Console(width=150).print(table)
    if options.json:
        write_json(options.json, {"machine": machine(), "versions": versions(), "scenes": scenes} | _setting())


def _median(fetches: Sequence[Fetch]) -> str:
    return f"{statistics.median(fetch.duration_s for fetch in fetches):.2f}"


def _setting() -> dict[str, float]:
    return {
        "read_bytes": READ_BYTES,
        "reads": NUM_READS,
        "reads_at_once": READS_AT_ONCE,
        "link_gbps": LINK_GBPS,
        "deadline_s": DEADLINE_S,
    }


if __name__ == "__main__":
    main()
