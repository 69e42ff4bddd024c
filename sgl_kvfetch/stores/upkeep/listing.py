"""What a store holds: its objects by segment, the names of its folders, and how much of a prompt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sgl_kvfetch.codec import Manifest, decode_manifest
from sgl_kvfetch.errors import FormatError, StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX, SegmentKey, parse_object_name
from sgl_kvfetch.labels import Labels, are_named
from sgl_kvfetch.stores.base import AdminStore, ObjectInfo, Store

_MOST_FOLDERS = 64


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


class FolderNames(NamedTuple):
    """The names of a folder for people: the model of its namespace, and the labels of one of its segments."""

    model: str
    labels: Labels


def folders_named(name: str, names: Mapping[str, FolderNames]) -> set[str]:
    """Return the folders of the model that is called ``name``; if there is none, those whose digest, label or model
    starts with it. ``names``: as of ``names_of_folders``."""
    if exact := {folder for folder, (model, labels) in names.items() if are_named(name, model, labels)}:
        return exact
    return {
        folder
        for folder, (model, labels) in names.items()
        if any(each.startswith(name) for each in (folder, model, model.partition(":")[2], labels.model))
    }


async def names_of_folders(objects: Objects, segments: Iterable[StoredSegment]) -> dict[str, FolderNames]:
    """Return what each folder is called; a folder has no name if none of its manifests can be read. Raises StoreError.

    Reads one manifest a folder, the first. In a directory, reading counts as a use: begin with the last used segments.
    """
    folders: dict[str, list[StoredSegment]] = {}
    for segment in segments:
        folders.setdefault(segment.key.namespace, []).append(segment)
    names = {}
    for folder, inside in folders.items():
        manifest = await first_readable_manifest(objects, inside)
        names[folder] = FolderNames("", Labels())
        if manifest is not None:
            names[folder] = FolderNames(manifest.namespace.model, manifest.labels)
    return names


def decode_named_manifest(content: bytes, name: str) -> Manifest:
    """Decode the manifest that is stored as ``name``. Raises FormatError, also if it belongs under another name."""
    manifest = decode_manifest(content)
    if manifest.key.manifest_name != name:
        raise FormatError(f"manifest belongs under the name {manifest.key.manifest_name}")
    return manifest


async def stored_page_sizes(store: AdminStore) -> set[int]:
    """Return the page sizes, in tokens, of the first `_MOST_FOLDERS` folders. Raises StoreError.

    Reads one manifest a folder.
    """
    sizes = set()
    for folder in sorted(await store.folders())[:_MOST_FOLDERS]:
        async for info in store.list(f"{folder}/"):
            if info.name.endswith(MANIFEST_SUFFIX):
                segment = StoredSegment(parse_object_name(info.name).segment)
                if (manifest := await first_readable_manifest(store, [segment])) is not None:
                    sizes.add(manifest.namespace.page_size)
                break
    return sizes


async def pages_stored(store: Store, hashes: Sequence[bytes]) -> dict[str, int]:
    """Return how many of a prompt's pages a lookup finds with all heads, by namespace.

    Ranks store their own heads, in folders of their own. Raises StoreError and FormatError.
    """
    runs: dict[str, int] = {}
    num_heads: dict[str, int] = {}
    for folder in await store.folders():
        if (found := await store.lookup(folder, hashes)).hits:
            runs[folder] = found.num_pages
            if (namespace := folder.partition(".")[0]) not in num_heads:
                num_heads[namespace] = decode_manifest(found.hits[0].manifest).namespace.num_heads
    return whole_pages(runs, num_heads)


def whole_pages(runs: Mapping[str, int], num_heads: Mapping[str, int]) -> dict[str, int]:
    """Return how many pages are stored with all heads, by namespace.

    ``runs``: how many pages each folder has in a row. ``num_heads``: of the model, by namespace; others are left out.
    """
    pages_of_heads: dict[str, list[int]] = {namespace: [0] * heads for namespace, heads in num_heads.items()}
    for folder, num_pages in runs.items():
        namespace, _, heads = folder.partition(".")
        pages = pages_of_heads.get(namespace, [])
        for head in range(*map(int, heads.split("-"))):
            if head < len(pages):
                pages[head] = max(pages[head], num_pages)
    return {namespace: min(pages) for namespace, pages in pages_of_heads.items()}
