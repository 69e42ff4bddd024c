"""Write segments until killed. test_killed_writer runs this as a process."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from sgl_kvfetch.directory.local import LocalStore


async def write(root: Path, segments: Path) -> None:
    store = LocalStore(root)
    names = (segments / "names").read_text().splitlines()
    contents = [(name, (segments / str(i)).read_bytes()) for i, name in enumerate(names)]
    print("ready", flush=True)
    while True:
        for name, content in contents:
            await store.put(name, content)
            if name.endswith(".kvm"):
                await store.delete(name)


asyncio.run(write(Path(sys.argv[1]), Path(sys.argv[2])))
