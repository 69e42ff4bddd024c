"""Profiles of a store in a directory. `local_profiles` has their files; this puts calls on threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from sgl_kvfetch.directory import files
from sgl_kvfetch.directory.local_profiles import ProfileWriter, delete_profile, list_profiles, open_profile
from sgl_kvfetch.directory.workers import Workers, on
from sgl_kvfetch.directory.writing import Upload
from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.stores import ObjectInfo, require_profile_length, require_profile_name

P = ParamSpec("P")
T = TypeVar("T")


class StoredProfiles:
    """The profiles of a store."""

    def __init__(self, root: Path, capacity_bytes: int | None, workers: Workers) -> None:
        self._root = root
        self._capacity_bytes = capacity_bytes
        self.workers = workers

    @on("reads")
    def infos(self) -> Sequence[ObjectInfo]:
        with files.os_errors("listing profiles"):
            return list_profiles(self._root)

    async def open(self, name: str) -> files.OpenObject | None:
        require_profile_name(name)
        return await self.workers.open(self._open, name)

    def _open(self, name: str) -> files.OpenObject | None:
        with files.os_errors(f"opening profile {name}"):
            return open_profile(self._root, name)

    async def get(self, name: str, length: int) -> bytes | None:
        require_profile_length(name, length)
        opened = await self.open(name)
        if opened is None:
            return None
        with opened.file as file, files.os_errors(f"reading profile {name}"):
            data = await self.workers.run("reads", files.read_fully, file, 0, length)
        if len(data) < length:
            raise StoreError("truncated", f"profile {name} has {len(data)} bytes; expected {length}")
        return data

    async def put(self, name: str, data: bytes) -> None:
        async with self.upload(name, len(data)) as upload:
            await upload.write(data)
            await upload.commit()

    @asynccontextmanager
    async def upload(self, name: str, size_bytes: int) -> AsyncIterator[Upload]:
        require_profile_name(name)
        writer = ProfileWriter(self._root, name, size_bytes, self._capacity_bytes)

        def run(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
            with files.os_errors(f"writing profile {name}"):
                return call(*args, **kwargs)

        try:
            await self.workers.run("writes", run, writer.open)
            yield Upload(
                lambda data: self.workers.run("writes", run, writer.write, data),
                lambda: self.workers.run("writes", run, writer.commit),
            )
        finally:  # cancelled, too: the thread goes on
            await asyncio.shield(asyncio.to_thread(run, writer.discard))

    @on("writes")
    def delete(self, name: str) -> bool:
        require_profile_name(name)
        with files.os_errors(f"deleting profile {name}"):
            return delete_profile(self._root, name)
