"""Names: of namespaces, segments and their objects, with the buddy alignment of segments; and of models and quantisers.

**Names for people** stand beside identities that say nothing to them: a model's is a fingerprint, a quantiser's has all
parameters. A label decides nothing. Servers with the same weights share segments, whatever they call their model.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

from sgl_kvfetch.errors import FormatError, NamespaceMismatchError, UnsupportedError
from sgl_kvfetch.types import KVGeometry, first_to_last

MAX_LABEL_CHARS = 128
_DIGEST_CHARS = 16

_Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
_KLT = re.compile(r"klt\(profile=(?P<profile>[0-9a-f]{32});step=(?P<step>[0-9.e+-]{1,16})\)")
_BINS = re.compile(r"cachegen\(k=([0-9,]+);v=([0-9,]+)\)")
_geometry = lru_cache(KVGeometry)  # readers ask for each cell


class Labels(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the writer of a segment calls its model, its quantiser, the flags that its namespace has a digest of, and
    its own machine; empty if it gave no name."""

    model: _Label = ""
    quantiser: _Label = ""
    flags: _Label = ""
    writer: _Label = ""

    def model_name(self, identity: str) -> str:
        """Return the name to show for a namespace's ``model``: the label, or else the user's own ``model_id``."""
        return self.model or identity.removeprefix("id:")

    def quantiser_name(self, identity: str) -> str:
        """Return the name to show for a namespace's ``quantiser``, such as ``klt 6.5e-4`` or ``cachegen 32/16``.

        Writers choose the identity, so it may be any text. It is shown as it is if it only looks like ``klt``.
        """
        if self.quantiser:
            return self.quantiser
        if match := _KLT.fullmatch(identity):
            try:
                return f"klt step {float(match['step']):.3g}"
            except ValueError:
                return identity
        if match := _BINS.fullmatch(identity):
            k, v = ("/".join(dict.fromkeys(bins.split(","))) for bins in match.groups())
            return f"cachegen {k}" if k == v else f"cachegen k {k}, v {v}"
        return identity.partition("(")[0]


def profile_digest(identity: str) -> str | None:
    """Return the digest of the profile in a quantiser's identity; None if it has none."""
    match = _KLT.fullmatch(identity)
    return match and match["profile"]


def label_of_model(served_name: str, path: str) -> str:
    """Return the label for a model: the name that it is served under, or its directory's."""
    name = served_name
    if served_name == path and (path.startswith("/") or os.path.isdir(path)):
        parts = [part for part in path.split("/") if part]
        name = parts[-1] if parts else ""
        if len(parts) > 2 and parts[-2] == "snapshots":  # Hugging Face's cache: models--ORG--NAME/snapshots/REVISION
            name = parts[-3].removeprefix("models--").replace("--", "/")
    return valid_unicode(name)[:MAX_LABEL_CHARS]


def label_of_flags(flags: Mapping[str, object]) -> str:
    """Return the label for flags and their JSON values: ``is_embedding=true, kv_cache_dtype=fp8_e4m3``."""
    texts = (
        f"{name}={value if isinstance(value, str) else msgspec.json.encode(value, order='sorted').decode()}"
        for name, value in sorted(flags.items())
    )
    return valid_unicode(", ".join(texts))[:MAX_LABEL_CHARS]


def label_of_request(request_id: str) -> str:
    """Return the label for a request: its id; of a long one, the first 128 characters and a digest of all.

    Users of SGLang's API choose ids, of any length and of any characters, and every server keeps its last ones. The
    label is valid Unicode, and it is its own label: what people copy from a server names the same request.
    """
    text = valid_unicode(str(request_id))  # SGLang's `Engine` takes ids that are no strings, too
    if len(text) <= MAX_LABEL_CHARS + 1 + _DIGEST_CHARS:
        return text
    return f"{text[:MAX_LABEL_CHARS]}~{xxhash.xxh3_64_hexdigest(text.encode())}"


def valid_unicode(text: str) -> str:
    """Return a text for people that every encoder takes. JSON, arguments and names of files may bring lone surrogates,
    which UTF-8 cannot have: they become ``\\udcff``."""
    return text.encode("utf-8", "backslashreplace").decode()


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can have this text: it has no lone surrogates."""
    return valid_unicode(text) == text


def label_of_klt(target_kl: float) -> str:
    """Return the label for ``klt`` at a target, in nats: ``klt 6.5e-4``."""
    digits, _, exponent = f"{target_kl:.1e}".partition("e")
    return f"klt {digits.removesuffix('.0')}e{int(exponent)}"


def are_named(name: str, identity: str, labels: Labels) -> bool:
    """Return whether somebody who writes ``name`` means this model: its label, or that label's last part, its
    ``model_id`` or fingerprint, with ``id:`` or ``weights:`` or without, or the path of its directory."""
    label = labels.model
    known = {label, label.rpartition("/")[2], identity, identity.partition(":")[2]} - {""}
    return name in known or (name.startswith("/") and name.rstrip("/").rpartition("/")[2] == label)


FORMAT_MAJOR = 2  # readers refuse any other
FORMAT_MINOR = 8  # readers accept any; a higher one may add fields, which they ignore

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
    attention: _Text  # "mha" or "mla", and what a page has beside K and V
    kv_dtype: _Text
    page_size: int
    num_layers: int
    first_layer: int  # of this pipeline stage
    num_heads: int  # of the model
    k_head_dim: int
    v_head_dim: int
    quantiser: _Text  # name and parameters
    format_major: int = FORMAT_MAJOR

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in asdict(self).items())

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
        return _geometry(n.num_layers, len(self.heads), n.k_head_dim, n.v_head_dim, n.page_size, n.kv_dtype)

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


def hash_bytes(hashes: Sequence[str]) -> list[bytes]:
    """Convert hashes to bytes, the form in which they are stored. Raises UnsupportedError for another kind of hash."""
    try:
        joined = bytes.fromhex("".join(hashes))  # at once: a prompt may have tens of thousands
    except ValueError as e:
        raise UnsupportedError(f"expected hexadecimal page hashes, found {hashes[0]!r}") from e
    if len(joined) != len(hashes) * PAGE_HASH_BYTES or not {2 * PAGE_HASH_BYTES}.issuperset(map(len, hashes)):
        raise UnsupportedError(f"expected page hashes of {PAGE_HASH_BYTES} bytes, found {hashes[0]!r}")
    return split_hashes(joined)
