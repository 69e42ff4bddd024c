"""Names of namespaces, segments and their objects, and the buddy alignment of segments."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.errors import FormatError, NamespaceMismatchError
from sgl_kvfetch.labels import Labels
from sgl_kvfetch.types import KVGeometry, first_to_last

FORMAT_MAJOR = 2  # readers refuse any other
FORMAT_MINOR = 6  # readers accept any; a higher one may add fields, which they ignore

PAGE_HASH_BYTES = 32  # SGLang's page hashes are SHA-256
MAX_NAMESPACE_CHARS = 2048  # of each string of a namespace; bins of 126 layers take a thousand
NAMESPACE_PATTERN = r"[0-9a-f]{32}\.[0-9]{1,3}-[0-9]{1,3}"  # digest, then the heads: first to end

MANIFEST_SUFFIX = ".kvm"
DATA_SUFFIX = ".kvd"

_NAME = re.compile(
    rf"(?P<namespace>{NAMESPACE_PATTERN})/"
    r"(?P<pages>[1-9][0-9]{0,6})-(?P<hash>[0-9a-f]{64})"
    r"(?:(?P<manifest>\.kvm)|\.(?P<content>[0-9a-f]{32})\.kvd)"
)


_Text = Annotated[str, Meta(max_length=MAX_NAMESPACE_CHARS)]


@dataclass(frozen=True, slots=True)
class Namespace:
    """All properties that make two KV caches incompatible. Segments are shared only within a namespace.

    The heads of a rank are not part of it: see `HeadSlice`.
    """

    model: _Text  # fingerprint of the weights and their configs, or the user's own name for them
    model_dtype: _Text  # dtype the model computes in, quantisation, and a digest of other flags
    attention: _Text  # "mha" or "mla", and what identifies the pages of side pools
    kv_dtype: _Text
    page_size: int
    num_layers: int
    first_layer: int  # of this pipeline stage
    num_heads: int  # of the model
    k_head_dim: int
    v_head_dim: int
    quantiser: _Text  # name and parameters
    format_major: int = FORMAT_MAJOR

    def digest(self) -> str:
        """Return 32 hex digits that name this namespace."""
        return xxhash.xxh3_128_hexdigest(msgspec.json.encode(asdict(self), order="sorted"))

    def require_same(self, other: Namespace) -> None:
        """Raise NamespaceMismatchError, naming the first field in which ``other`` (the stored one) differs."""
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if mine != theirs:
                raise NamespaceMismatchError(
                    f"segment belongs to another namespace: {each.name} is {theirs!r}, expected {mine!r}"
                )


@dataclass(frozen=True)
class HeadSlice:
    """The heads of a namespace that one rank stores. ``labels``: what its writer calls the model, if that is known."""

    namespace: Namespace
    heads: range
    labels: Labels = field(default=Labels(), compare=False)

    @cached_property
    def folder(self) -> str:
        """The folder of these segments in a store."""
        return f"{self.namespace.digest()}.{self.heads.start}-{self.heads.stop}"

    @property
    def geometry(self) -> KVGeometry:
        """The shape of the rank's KV cache. Raises UnsupportedError for numbers out of bounds."""
        n = self.namespace
        return KVGeometry(n.num_layers, len(self.heads), n.k_head_dim, n.v_head_dim, n.page_size, n.kv_dtype)

    def siblings(self, folders: Iterable[str]) -> list[HeadSlice]:
        """Return those of the namespace's ``folders``, of any TP size, whose heads overlap this rank's.

        Runs of heads that no TP size gives to a rank are left out: each sibling costs a lookup, and whoever may write
        to the store can make folders.
        """
        mine, total = self.heads, self.namespace.num_heads
        ranges = {range(*map(int, folder.rpartition(".")[2].split("-"))) for folder in folders} - {mine}
        of_ranks = (r for r in ranges if r and r.stop <= total and total % len(r) == r.start % len(r) == 0)
        overlapping = (r for r in of_ranks if max(r.start, mine.start) < min(r.stop, mine.stop))
        return [HeadSlice(self.namespace, r) for r in sorted(overlapping, key=lambda r: (r.start, -r.stop))]

    def require_same(self, other: HeadSlice) -> None:
        """Raise NamespaceMismatchError, naming the first field in which ``other`` (the stored one) differs."""
        self.namespace.require_same(other.namespace)
        if other.heads != self.heads:
            raise NamespaceMismatchError(
                f"segment has heads {first_to_last(other.heads.start, other.heads.stop)}, "
                f"expected {first_to_last(self.heads.start, self.heads.stop)}"
            )


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """Names a run of ``num_pages`` pages by the chained hash of its last one."""

    namespace: str  # `HeadSlice.folder`
    num_pages: int
    last_page_hash: bytes

    def __post_init__(self) -> None:
        assert self.num_pages >= 1
        assert len(self.last_page_hash) == PAGE_HASH_BYTES

    @property
    def stem(self) -> str:
        return f"{self.namespace}/{self.num_pages}-{self.last_page_hash.hex()}"

    @property
    def manifest_name(self) -> str:
        return self.stem + MANIFEST_SUFFIX

    def data_name(self, content_digest: str) -> str:
        """Return the name of a data object. It has the content's digest, so that writers never mix their data."""
        return f"{self.stem}.{content_digest}{DATA_SUFFIX}"


@dataclass(frozen=True, slots=True)
class ObjectName:
    """A parsed object name. ``content_digest`` is None for a manifest."""

    segment: SegmentKey
    content_digest: str | None

    @property
    def is_manifest(self) -> bool:
        return self.content_digest is None


def parse_object_name(name: str) -> ObjectName:
    """Parse an object name, which then is also safe as a relative path. Raises FormatError for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise FormatError(f"not an object name: {name[:120]!r}")
    key = SegmentKey(match["namespace"], int(match["pages"]), bytes.fromhex(match["hash"]))
    return ObjectName(key, match["content"])


def is_object_name(name: str) -> bool:
    """Return whether `parse_object_name` accepts this text."""
    return _NAME.fullmatch(name) is not None


class ContentCheck:
    """Checks a data object's content against the digest in its name."""

    def __init__(self, name: str, content: bytes = b"") -> None:
        """``content``: the first bytes, or all; `add` takes more. Raises FormatError if ``name`` is no object's."""
        self._expected = parse_object_name(name).content_digest
        self._hasher = xxhash.xxh3_128(content)

    def add(self, piece: bytes | memoryview) -> None:
        self._hasher.update(piece)

    @property
    def is_sound(self) -> bool:
        """Return whether the bytes so far are the object's content."""
        return self._hasher.hexdigest() == self._expected


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def buddy_split(first_page: int, num_pages: int, max_pages: int) -> Iterator[tuple[int, int]]:
    """Cut pages ``[first_page, first_page + num_pages)`` into segments ``(first_page, num_pages)``.

    A segment's length is a power of two, at most ``max_pages``, and divides the position where it starts. The longest
    possible length at each position makes the split unique, so that independent writers split alike.
    """
    assert is_power_of_two(max_pages), max_pages
    page, end = first_page, first_page + num_pages
    while page < end:
        aligned = page & -page if page else max_pages
        fits = 1 << ((end - page).bit_length() - 1)
        length = min(aligned, fits, max_pages)
        yield page, length
        page += length


def split_hashes(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + PAGE_HASH_BYTES] for i in range(0, len(hashes), PAGE_HASH_BYTES)]
