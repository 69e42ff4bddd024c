"""Write and delete segments until killed. test_killed_writer runs this as a process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from harness.small_segments import make_segment, page_hashes, put_segment
from sgl_kvfetch.directory.local import LocalStore

NUM_PAGES = 16


async def write(root: Path, turn: int) -> None:
    """Print each segment that is acknowledged, and each that is about to be deleted."""
    store, number = LocalStore(root), 0
    while True:
        chain = page_hashes(NUM_PAGES, f"{turn}.{number}")
        segment = make_segment(chain, 0, NUM_PAGES, content=number)
        await put_segment(store, segment)
        print(f"put {turn}.{number}", flush=True)
        if number % 3 == 2:
            print(f"delete {turn}.{number}", flush=True)
            await store.delete(segment.manifest.key.manifest_name)
        number += 1


if __name__ == "__main__":
    asyncio.run(write(Path(sys.argv[1]), int(sys.argv[2])))
