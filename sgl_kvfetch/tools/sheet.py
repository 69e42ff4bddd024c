"""Draws one span's contact sheet for `kvfetch serve`, which starts this in a process of its own.

Whoever may write to the store chooses the bytes that are decoded here. So the process has little memory, writes no
file, knows no secret and ends with the server. It prints the sheet as a PNG.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

from sgl_kvfetch.directory import LocalStore
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.processes import end_with_parent
from sgl_kvfetch.stores.upkeep import read_manifest
from sgl_kvfetch.tools.pictures import draw_sheet

MOST_BYTES = 1 << 30  # beyond what the loaded libraries take


async def _draw(root: Path, manifest_name: str, span: int) -> bytes:
    store = LocalStore(root)
    try:
        manifest = await read_manifest(store, manifest_name)
        if manifest is None:
            raise KVFetchError(f"no segment {manifest_name}")
        return await draw_sheet(store, manifest, span)
    finally:
        await store.close()


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(root: str, manifest_name: str, span: str, parent: str) -> None:
    end_with_parent(int(parent))
    _limit()
    try:
        sys.stdout.buffer.write(asyncio.run(_draw(Path(root), manifest_name, int(span))))
    except KVFetchError as e:
        sys.exit(str(e))
    except MemoryError:
        sys.exit(f"the frames take more than {MOST_BYTES >> 20} MiB of memory")


if __name__ == "__main__":
    main(*sys.argv[1:])
