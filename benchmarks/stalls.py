"""Measures how stalled connections and outages delay a fetch, with and without hedged reads.

    python -m benchmarks.stalls [--json OUT] [--repeat N]

A fetch reads one object in many parts, several at a time, with the client that SGLang's servers use, from a real store
over real sockets and a link of limited speed. A proxy injects the faults. Bytes are neither decoded nor restored.
"""

from __future__ import annotations

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

from benchmarks.machine import machine, versions
from benchmarks.report import make_parser, make_table, whole_number, write_json
from harness.faults import Fault, FaultyProxy
from harness.slow_link import slow_link
from harness.small_segments import data_object
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.server import ServerConfig
from sgl_kvfetch.server.run import running_server
from sgl_kvfetch.stores.hedged import MAX_HEDGES
from sgl_kvfetch.stores.open import open_hedged
from sgl_kvfetch.stores.remote import HttpOptions

READ_BYTES = 1 << 20
NUM_READS = 64
READS_AT_ONCE = 8
LINK_GBPS = 0.4
DEADLINE_S = 10.0
FAULT_AFTER_S = 0.5
_SETTING = {
    "read_bytes": READ_BYTES,
    "reads": NUM_READS,
    "reads_at_once": READS_AT_ONCE,
    "link_gbps": LINK_GBPS,
    "deadline_s": DEADLINE_S,
}


@dataclass(frozen=True, slots=True)
class Scene:
    """After ``after_s``, the store permanently gets ``fault``, or its link is dead for ``gone_s``."""

    name: str
    fault: Fault | None = None
    after_s: float = 0.0
    gone_s: float = 0.0


_HALFWAY = READ_BYTES // 2
SCENES = (
    Scene("nothing happens"),
    Scene("a connection hangs", Fault("hang", times=1), FAULT_AFTER_S),
    Scene("a connection stalls in mid-body", Fault("stall", after_bytes=_HALFWAY, times=1), FAULT_AFTER_S),
    Scene("the link is at zero for 3 s", after_s=FAULT_AFTER_S, gone_s=3.0),
)


@dataclass(frozen=True, slots=True)
class Fetch:
    duration_s: float
    reads_done: int  # how many of NUM_READS, within the deadline
    requests: int  # how many reached the proxy
    hedges: dict[str, int]  # number of second requests, by result


async def run_fetch(scene: Scene, max_hedges: int, folder: Path) -> Fetch:
    """Run one fetch. ``max_hedges``: second requests at a time, 0 for none. ``folder`` is filled if it is empty."""
    content = random.Random(0).randbytes(NUM_READS * READ_BYTES)
    name = data_object(content)
    filling = LocalStore(folder)
    if await filling.head(name) is None:
        await filling.put(name, content)
    await filling.close()
    loop = asyncio.get_running_loop()
    hedges: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        stack.enter_context(slow_link(LINK_GBPS))
        # The object has no manifest, but must not be collected as an orphan.
        config = ServerConfig(folder, port=0, orphan_age_s=86400.0)
        server = await stack.enter_async_context(running_server(config))
        proxy = await stack.enter_async_context(FaultyProxy(server.host, server.port))
        store = open_hedged(
            proxy.url,
            options=HttpOptions(timeout_s=DEADLINE_S, max_connections=READS_AT_ONCE),
            max_hedges=max_hedges,
            on_hedge=lambda _, result: hedges.update([result]),
        )
        stack.push_async_callback(store.close)

        async def read(idx: int) -> None:
            assert await store.get(name, idx * READ_BYTES, READ_BYTES) is not None

        began_s = loop.time()
        fault = loop.create_task(_befall(scene, proxy))
        reads = [loop.create_task(read(idx)) for idx in range(NUM_READS)]
        await asyncio.wait(reads, timeout=DEADLINE_S)
        duration_s = loop.time() - began_s
        for task in (fault, *reads):
            task.cancel()
        ended = await asyncio.gather(*reads, return_exceptions=True)
        _raise_unexpected(ended)
        return Fetch(duration_s, ended.count(None), len(proxy.requests), dict(hedges))


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
    parser = make_parser("benchmarks.stalls", __doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeat", type=whole_number, default=3, help="fetches of each kind, in turn")
    args = parser.parse_args()
    rows, scenes = [], []
    with tempfile.TemporaryDirectory() as folder:
        for scene in SCENES:
            pairs = [
                [asyncio.run(run_fetch(scene, max_hedges, Path(folder))) for max_hedges in (0, MAX_HEDGES)]
                for _ in range(args.repeat)
            ]
            without, hedged = zip(*pairs, strict=True)
            scenes.append(
                {"name": scene.name, "without": [asdict(f) for f in without], "hedged": [asdict(f) for f in hedged]}
            )
            rows.append(
                (
                    scene.name,
                    *(_median(without), str(min(fetch.reads_done for fetch in without))),
                    *(_median(hedged), str(min(fetch.reads_done for fetch in hedged))),
                    str(max(fetch.requests for fetch in hedged)),
                    str(hedged[-1].hedges or ""),
                )
            )
    columns = ("scene", "without, s", "reads", "with, s", "reads", "requests", "second requests")
    Console(width=150).print(make_table("Fetches without and with hedged reads", columns, rows))
    if args.json:
        write_json(args.json, {"machine": machine(), "versions": versions(), "scenes": scenes} | _SETTING)


def _median(fetches: Sequence[Fetch]) -> str:
    return f"{statistics.median(fetch.duration_s for fetch in fetches):.2f}"


if __name__ == "__main__":
    main()
