"""Finds out which pages of a prompt a store has for a server, and why it does not have the rest.

A page hash stands for all tokens before it, so whatever names one of the prompt's hashes is a trace of this prompt: a
segment whose last page has it, an expired one, one behind a gap, one in another server's namespace. The listing has
such names. What left no trace was never written, as far as the store can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from itertools import pairwise

from msgspec import Struct

from sgl_kvfetch.codec import NO_KEYS, Manifest, StoreKeys, decode_manifest
from sgl_kvfetch.errors import FormatError, NamespaceMismatchError, StoreError, UnsupportedError
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.reasons import Reason, reason_of
from sgl_kvfetch.stores import AdminStore, Lookup
from sgl_kvfetch.stores.upkeep import StoredSegment, decode_named_manifest, read_manifest, whole_pages
from sgl_kvfetch.tools.summary import NamespaceSummary, signature_of
from sgl_kvfetch.tools.verify import Verifier
from sgl_kvfetch.types import first_to_last

# The reason for a namespace that differs in a field; the first field in this order counts.
_FIELDS = {
    "model": Reason.OTHER_WEIGHTS,
    "page_size": Reason.OTHER_PAGE_SIZE,
    "quantiser": Reason.OTHER_QUANTISER,
    "model_dtype": Reason.OTHER_FLAGS,
}

_MOST_READ = 512  # manifests, the newest ones, to find prompts that begin like this one

HashesAt = Callable[[int], list[bytes]]  # the hashes of the prompt's whole pages of so many tokens


class Finding(Struct, frozen=True):
    """Why pages ``first_page`` up to ``end_page`` are not served."""

    reason: Reason
    first_page: int
    end_page: int
    detail: str


class Stored(Struct, frozen=True):
    """How much of a prompt is stored for one namespace: whole pages from the first on, with all heads."""

    namespace: str  # its digest
    num_pages: int
    page_size: int


def different_fields(theirs: Namespace, ours: Namespace) -> dict[str, tuple[object, object]]:
    """Return the fields in which namespaces differ, with both values."""
    pairs = {f.name: (getattr(theirs, f.name), getattr(ours, f.name)) for f in fields(Namespace)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def reason_of_difference(names: Mapping[str, object]) -> Reason:
    """Return the reason for namespaces that differ in these fields."""
    return next((reason for name, reason in _FIELDS.items() if name in names), Reason.OTHER_CACHE)


def tokens_of_page(page: int, page_size: int) -> str:
    return f"tokens {page * page_size} to {(page + 1) * page_size - 1}"


def when(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass
class Diagnosis:
    """Looks for one prompt in a store. ``segments``: all of the store's. ``summaries``: its namespaces. ``hashes_at``:
    the prompt's. ``unsalted_at``: the same without cache_salt; None if there is none. ``most_left_out``: how many
    levels a segment may lack. ``rank_heads``: those of the server's rank; None if there is no server."""

    store: AdminStore
    segments: Sequence[StoredSegment]
    summaries: Sequence[NamespaceSummary]
    hashes_at: HashesAt
    unsalted_at: HashesAt | None = None
    keys: StoreKeys = NO_KEYS
    most_left_out: int = 0
    rank_heads: range | None = None

    @property
    def only_page_size(self) -> int:
        """The page size of all that is stored; 0 if nothing is, or if there are several."""
        sizes = {namespace.page_size for namespace in self._namespaces()}
        return sizes.pop() if len(sizes) == 1 else 0

    async def stored(self) -> list[tuple[Stored, Namespace]]:
        """Return the namespaces that have the prompt's first page, the one with most tokens first."""
        found = []
        for namespace in self._namespaces():
            hashes = self.hashes_at(namespace.page_size)
            num_pages = await self._num_pages(namespace, hashes)
            if num_pages:
                found.append((Stored(namespace.digest(), num_pages, namespace.page_size), namespace))
        return sorted(found, key=lambda each: -each[0].num_pages * each[0].page_size)

    async def explain(self, wanted: Namespace) -> tuple[int, Finding | None]:
        """Return how many pages are stored for ``wanted`` and can be used, and why no more."""
        hashes = self.hashes_at(wanted.page_size)
        lookups = await self._look_up(wanted, hashes)
        faults = {folder: await self._first_fault(found, wanted, len(hashes)) for folder, found in lookups.items()}
        runs = {
            folder: found.num_pages if (fault := faults[folder]) is None else fault.first_page
            for folder, found in lookups.items()
        }
        end = _pages_with_all_heads(runs, wanted)
        if end == len(hashes):
            return end, None
        for fault in faults.values():
            if fault is not None and fault.first_page == end:
                return end, fault
        for find in (self._missing_heads, self._traces, self._elsewhere, self._without_salt, self._diverges):
            if (found_reason := await find(wanted, hashes, lookups, end)) is not None:
                reason, detail = found_reason
                return end, Finding(reason, end, len(hashes), detail)
        return end, Finding(Reason.NEVER_WRITTEN, end, len(hashes), "the store has no trace of them")

    async def _look_up(self, namespace: Namespace, hashes: Sequence[bytes]) -> dict[str, Lookup]:
        folders = sorted(await self.store.folders(namespace.digest()))
        return {folder: await self.store.lookup(folder, hashes) for folder in folders} if hashes else {}

    async def _num_pages(self, namespace: Namespace, hashes: Sequence[bytes]) -> int:
        found = await self._look_up(namespace, hashes)
        return _pages_with_all_heads({folder: each.num_pages for folder, each in found.items()}, namespace)

    def _namespaces(self) -> list[Namespace]:
        return list(dict.fromkeys(each.namespace for each in self.summaries if each.namespace is not None))

    # What is found, and cannot be used

    async def _first_fault(self, found: Lookup, wanted: Namespace, num_pages: int) -> Finding | None:
        """Return what is wrong with the first unusable segment of a lookup; None if all can be used."""
        page = 0
        for hit in found.hits:
            fault = self._manifest_fault(hit.manifest, wanted)
            if fault is None:
                fault = await self._data_fault(decode_manifest(hit.manifest))
            if fault is not None:
                return Finding(fault[0], page, num_pages, fault[1])
            page += hit.num_pages
        return None

    def _manifest_fault(self, content: bytes, wanted: Namespace) -> tuple[Reason, str] | None:
        try:
            manifest = decode_manifest(content)
            wanted.require_same(manifest.namespace)
            if self.rank_heads and (set(self.rank_heads) & set(manifest.heads.heads)):
                manifest.head_blocks(self.rank_heads)
        except (FormatError, NamespaceMismatchError, UnsupportedError) as e:
            return reason_of(e), str(e)
        stem = manifest.key.stem
        if (signature := signature_of(content, self.keys.manifest)) in ("wrong", "missing"):
            return Reason.UNSIGNED, f"{stem}: the signature is {signature}"
        ours = self.keys.encryption
        locked = [name for name in manifest.key_names if ours is not None and name not in ours]
        if locked:
            return Reason.ENCRYPTED, f"{stem} is encrypted with {', '.join(locked)}"
        lost = min(variant.num_dropped for variant in manifest.variants)
        if lost > self.most_left_out:
            return Reason.COARSE, f"{stem} has lost {lost} levels; {self.most_left_out} may be left out"
        return None

    async def _data_fault(self, manifest: Manifest) -> tuple[Reason, str] | None:
        """Read and decode a segment's data. Return what is wrong with it."""
        stored = next((each for each in self.segments if each.key == manifest.key), None)
        if stored is None:  # it came after the listing
            return None
        with ThreadPoolExecutor(1, thread_name_prefix="kvfetch-verify") as pool:
            report = await Verifier(self.store, pool, jobs=1, keys=self.keys).run([stored])
        for problem in report.problems:
            is_gone = problem.what.startswith("missing")
            return Reason.MISSING if is_gone else Reason.CORRUPT, f"{problem.name}: {problem.what}"
        return None

    # What is not found

    async def _missing_heads(
        self, wanted: Namespace, hashes: Sequence[bytes], lookups: Mapping[str, Lookup], end: int
    ) -> tuple[Reason, str] | None:
        longer = [folder.rpartition(".")[2] for folder, found in lookups.items() if found.num_pages > end]
        if not longer:
            return None
        heads = ", ".join(first_to_last(*map(int, each.split("-"))) for each in longer)
        return Reason.OTHER_HEADS, f"heads {heads} of {wanted.num_heads} are stored, others are missing"

    async def _traces(
        self, wanted: Namespace, hashes: Sequence[bytes], lookups: Mapping[str, Lookup], end: int
    ) -> tuple[Reason, str] | None:
        """Look for segments of the prompt that a lookup does not find: expired, damaged, or behind a gap."""
        pages = {page_hash: page for page, page_hash in enumerate(hashes)}
        digest, behind, unfinished = wanted.digest(), 0, 0
        for stored in self.segments:
            page = pages.get(stored.key.last_page_hash, -1)
            if page < end or stored.key.namespace.partition(".")[0] != digest:
                continue
            if stored.manifest is None:
                unfinished += 1
                continue
            name = stored.key.manifest_name
            try:
                content = await self.store.peek(name)
                manifest = None if content is None else decode_named_manifest(content, name)
            except FormatError as e:
                return reason_of(e), f"{name}: {e}"
            except StoreError as e:
                if not e.concerns_object:
                    raise
                return Reason.CORRUPT, f"{name}: {e}"
            if manifest is not None and manifest.is_expired(time.time()):
                return Reason.EXPIRED, f"{name} expired at {when(manifest.expires or 0)}"
            if manifest is not None and manifest.first_page > end:
                behind += 1
        if behind:
            detail = f"{behind} segments of this prompt behind them are stored: they were, too, or could not be written"
            return Reason.EVICTED, detail
        if unfinished:
            return (
                Reason.NEVER_WRITTEN,
                f"{unfinished} data objects have no manifest: being written, or left by a crash",
            )
        return None

    async def _elsewhere(
        self, wanted: Namespace, hashes: Sequence[bytes], lookups: Mapping[str, Lookup], end: int
    ) -> tuple[Reason, str] | None:
        """Look into other namespaces. Return in what the nearest one differs that has more of the prompt."""
        nearest: tuple[int, int] | None = None
        answer = None
        for namespace in self._namespaces():
            difference = different_fields(namespace, wanted)
            if not difference:
                continue
            num_pages = await self._num_pages(namespace, self.hashes_at(namespace.page_size))
            num_tokens = num_pages * namespace.page_size
            if num_tokens > end * wanted.page_size and (nearest is None or (len(difference), -num_tokens) < nearest):
                nearest = len(difference), -num_tokens
                there = f"{num_tokens} tokens are stored in namespace {namespace.digest()}"
                answer = reason_of_difference(difference), f"{there}, {'; '.join(self._compare(namespace, difference))}"
        return answer

    async def _without_salt(
        self, wanted: Namespace, hashes: Sequence[bytes], lookups: Mapping[str, Lookup], end: int
    ) -> tuple[Reason, str] | None:
        if self.unsalted_at is None:
            return None
        num_pages = await self._num_pages(wanted, self.unsalted_at(wanted.page_size))
        return (Reason.OTHER_SALT, f"{num_pages} pages are stored without cache_salt") if num_pages > end else None

    async def _diverges(
        self, wanted: Namespace, hashes: Sequence[bytes], lookups: Mapping[str, Lookup], end: int
    ) -> tuple[Reason, str] | None:
        """Look for prompts that have the prompt's last stored page, and another one behind it. Their segments go on
        behind that page, or begin there, and name the page before them."""
        if not end:
            return None
        digest, last, following = wanted.digest(), hashes[end - 1], set()
        chains = [decode_manifest(hit.manifest) for found in lookups.values() for hit in found.hits]
        others = [s for s in self.segments if s.manifest and s.key.namespace.partition(".")[0] == digest]
        for stored in sorted(others, key=lambda each: -each.modified_s)[:_MOST_READ]:
            try:
                manifest = await read_manifest(self.store, stored.key.manifest_name)
            except FormatError:
                continue  # `kvfetch verify` reports those
            except StoreError as e:
                if not e.concerns_object:
                    raise
                continue
            chains += [] if manifest is None else [manifest]
        for manifest in chains:
            following |= {b for a, b in pairwise((manifest.previous_hash, *manifest.page_hashes)) if a == last}
        following.discard(hashes[end])
        if not following:
            return None
        are_many = len(following) > 1
        return Reason.DIVERGES, (
            f"the prompt shares pages {first_to_last(0, end)} with {len(following)} stored prompt{'s' * are_many}, "
            f"and differs from {'each' if are_many else 'it'} in {tokens_of_page(end, wanted.page_size)}"
        )

    def _compare(self, namespace: Namespace, difference: Mapping[str, tuple[object, object]]) -> Iterator[str]:
        digest = namespace.digest()
        flags = next((s.flags for s in self.summaries if s.flags and s.digest.startswith(digest)), "")
        for name, (theirs, ours) in difference.items():
            named = f" ({flags})" if name == "model_dtype" and flags else ""
            yield f"whose {name} is {theirs!r}{named}, the server's {ours!r}"


def _pages_with_all_heads(runs: Mapping[str, int], namespace: Namespace) -> int:
    """Return how many pages have all heads. ``runs``: as in `whole_pages`."""
    digest = namespace.digest()
    return whole_pages(runs, {digest: namespace.num_heads})[digest]
