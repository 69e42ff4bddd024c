"""Reads a segment's files from outside a store's directory, whatever their names."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from sgl_kvfetch.container.manifest import MAX_MANIFEST_BYTES, decode_manifest
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.keys import DATA_SUFFIX, MANIFEST_SUFFIX
from sgl_kvfetch.stores.base import ObjectInfo


class LooseSegment:
    """Reads like a store that holds one segment.

    The data file must lie beside the manifest ``X.kvm``, under the name that the manifest gives it or as ``X.kvd``.
    """

    def __init__(self, path: Path) -> None:
        """Open the manifest or data file ``path``. Raises ConfigError, and FormatError for a bad manifest."""
        manifest_path = _manifest_path(path)
        try:
            with manifest_path.open("rb") as file:
                manifest = decode_manifest(file.read(MAX_MANIFEST_BYTES + 1))
        except OSError as e:
            raise ConfigError(f"{manifest_path}: {e.strerror}") from e
        self.stem = manifest.key.stem
        self._paths = {manifest.key.manifest_name: manifest_path}
        for variant in manifest.variants:
            name = manifest.data_name(variant)
            named = manifest_path.with_name(name.rpartition("/")[2])
            same_stem = manifest_path.with_suffix(DATA_SUFFIX)
            data_path = next((p for p in (named, same_stem) if p.is_file()), None)
            if data_path is not None:
                self._paths[name] = data_path

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        path = self._paths.get(name)
        return None if path is None else await asyncio.to_thread(_read, path, start, length)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for name, path in self._paths.items():
            if name.startswith(prefix):
                status = await asyncio.to_thread(path.stat)
                yield ObjectInfo(name, status.st_size, status.st_mtime)

    async def close(self) -> None:
        pass


def _manifest_path(path: Path) -> Path:
    if path.suffix == MANIFEST_SUFFIX:
        return path
    same_stem = path.with_suffix(MANIFEST_SUFFIX)
    without_digest = path.with_suffix("").with_suffix(MANIFEST_SUFFIX)
    found = next((p for p in (same_stem, without_digest) if p.is_file()), None)
    if found is None:
        raise ConfigError(f"{str(path)!r} cannot be read without its manifest; expected {same_stem.name} beside it")
    return found


def _read(path: Path, start: int, length: int | None) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read() if length is None else file.read(length)
    except OSError as e:
        raise StoreError("io", f"{path}: {e.strerror}") from e
    if length is not None and len(data) < length:
        raise StoreError("truncated", f"{path}: expected {length} bytes at offset {start}, but the file ends before")
    return data
