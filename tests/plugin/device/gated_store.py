"""A store whose answers wait until a test releases them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sgl_kvfetch.codec import Content
from sgl_kvfetch.stores.base import Lookup, Store, WrappedStore


class Gate:
    """Lets requests through, holds them or fails them, while the test runs on another thread."""

    def __init__(self) -> None:
        self.is_open = True
        self.error: Exception | None = None
        self.num_waiting = 0

    async def pass_through(self, name: str = "", start: int = 0) -> None:
        self.num_waiting += 1
        try:
            while not self.is_open:  # noqa: ASYNC110 -- set from another thread
                await asyncio.sleep(0.001)
        finally:
            self.num_waiting -= 1
        if self.error is not None:
            raise self.error


class GatedStore(WrappedStore):
    """A store whose lookups and reads go through gates."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.lookups, self.reads, self.puts = Gate(), Gate(), Gate()
        self.num_lookups = 0
        self.data_reads: list[tuple[str, int]] = []

    async def lookup(self, namespace: str, hashes: Sequence[bytes]) -> Lookup:
        self.num_lookups += 1
        await self.lookups.pass_through()
        return await self._store.lookup(namespace, hashes)

    async def put(self, name: str, data: Content) -> None:
        await self.puts.pass_through(name)
        await self._store.put(name, data)

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        if name.endswith(".kvd"):
            self.data_reads.append((name, start))
            await self.reads.pass_through(name, start)
        return await self._store.get(name, start, length)
