"""The objects of a store, grouped by segment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sgl_kvfetch.codec import Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import SegmentKey, parse_object_name
from sgl_kvfetch.stores.base import ObjectInfo


class Objects(Protocol):
    """The methods of a ``Store`` that are enough to list and read all objects."""

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None: ...

    def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]: ...

    async def close(self) -> None: ...


@dataclass(slots=True)
class StoredSegment:
    """The objects of one segment. Without a manifest, they are only data that no lookup finds."""

    key: SegmentKey
    manifest: ObjectInfo | None = None
    data: dict[str, ObjectInfo] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Total size of manifest and data."""
        own = self.manifest.size_bytes if self.manifest else 0
        return own + sum(info.size_bytes for info in self.data.values())

    @property
    def modified_s(self) -> float:
        """When the segment's last object was put, in seconds since the epoch."""
        infos = [*self.data.values(), *([self.manifest] if self.manifest else [])]
        return max(info.modified_s for info in infos)


async def list_segments(objects: Objects, prefix: str) -> list[StoredSegment]:
    """List the segments whose objects' names start with ``prefix``, sorted by name."""
    segments: dict[str, StoredSegment] = {}
    async for info in objects.list(prefix):
        parsed = parse_object_name(info.name)
        segment = segments.setdefault(parsed.segment.stem, StoredSegment(parsed.segment))
        if parsed.is_manifest:
            segment.manifest = info
        else:
            segment.data[info.name] = info
    return [segments[stem] for stem in sorted(segments)]


async def read_manifest(objects: Objects, name: str) -> Manifest | None:
    """Read and decode a manifest; None if it is gone. Raises FormatError, also if it belongs under another name."""
    content = await objects.get(name)
    return None if content is None else decode_named_manifest(content, name)


async def first_readable_manifest(objects: Objects, segments: Iterable[StoredSegment]) -> Manifest | None:
    """Read the first manifest that is there and decodes; None if there is none. Raises StoreError
    if the store cannot be used."""
    for segment in segments:
        try:
            manifest = await read_manifest(objects, segment.key.manifest_name)
        except FormatError:
            continue  # ``kvfetch verify`` reports those
        except StoreError as e:
            if not e.concerns_object:
                raise
            continue
        if manifest is not None:
            return manifest
    return None


def folders_named(name: str, models: Mapping[str, str]) -> set[str]:
    """Return the folders whose digest or model starts with ``name``. ``models``: as of ``models_of_folders``."""
    return {folder for folder, model in models.items() if folder.startswith(name) or model.startswith(name)}


async def models_of_folders(objects: Objects, segments: Iterable[StoredSegment]) -> dict[str, str]:
    """Return the model of each folder; "" if none of its manifests can be read. Raises StoreError.

    Reads one manifest a folder, the first. In a directory, that is a use: begin with the last used segments.
    """
    folders: dict[str, list[StoredSegment]] = {}
    for segment in segments:
        folders.setdefault(segment.key.namespace, []).append(segment)
    models = {}
    for folder, inside in folders.items():
        manifest = await first_readable_manifest(objects, inside)
        models[folder] = "" if manifest is None else manifest.namespace.model
    return models


def decode_named_manifest(content: bytes, name: str) -> Manifest:
    """Decode the manifest that is stored as ``name``. Raises FormatError, also if it belongs under another name."""
    manifest = decode_manifest(content)
    if manifest.key.manifest_name != name:
        raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
    return manifest
