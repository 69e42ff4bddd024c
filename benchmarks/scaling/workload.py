"""Simulates one server's requests, and counts what they cost the index and S3. All servers are alike.

A prompt is a shared document, the earlier turns of a conversation about it, and a new turn. Documents are drawn from
Zipf's distribution. The server keeps recently used documents itself (LRU) and asks the store for everything else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sgl_kvfetch.keys import buddy_split
from sgl_kvfetch.plane.client import MAX_SEGMENT_TOKENS
from sgl_kvfetch.plane.fetch.plan import ReadSize
from sgl_kvfetch.stores.s3 import MULTIPART_BYTES, PART_BYTES

_THRESHOLD_TOKENS = 256  # SGLang looks up no shorter prompt
Segment = tuple[int, int]  # first page and length


@dataclass(frozen=True)
class Workload:
    document_tokens: int = 3072  # mean
    document_sigma: float = 1.0  # of the logarithm of documents' lengths
    turn_tokens: int = 512  # mean of a question and its answer
    turns: int = 4  # of a conversation
    documents: int = 1_000_000
    zipf: float = 1.0
    hit_rate: float = 0.8  # share of the requests whose document is stored; the others write it
    local_tokens: int = 1_000_000  # tokens of documents that a server keeps in its pools
    page_size: int = 64
    span_tokens: int = 1024
    kv_bytes: int = 13107  # of a token after coding, all ranks: a tenth of Llama-3.1-8B's 131,072
    read_bytes: int = 4 << 20
    ranks: int = 1
    merging: int = 1  # 0: segments are never merged
    requests: int = 40_000  # simulated; the first half only fills the server's pools
    seed: int = 0


@dataclass
class Costs:
    """Totals of the simulated requests, all ranks together."""

    requests: int = 0
    prompt_pages: int = 0
    written_pages: int = 0  # of one rank
    gets: int = 0  # HEAD included
    name_gets: int = 0  # of these, for names that a lookup guesses and that do not exist
    puts: int = 0
    deletes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    index_calls: int = 0
    index_pages: int = 0  # looked up
    index_entered: int = 0  # entries written, merges included
    merges: int = 0


class Simulation:
    def __init__(self, workload: Workload) -> None:
        self.workload = w = workload
        self.costs = Costs()
        self.segment_lengths: Counter[int] = Counter()  # of GETs of data and manifests
        self.segment_gets: Counter[tuple[int, int]] = Counter()  # GETs of a document's segment, by its first page
        self._page_bytes = w.page_size * w.kv_bytes // w.ranks
        self._span_pages = max(1, w.span_tokens // w.page_size)
        self._max_pages = 1 << ((MAX_SEGMENT_TOKENS // w.page_size).bit_length() - 1)
        self._local: OrderedDict[int, int] = OrderedDict()  # pages of the documents that the server keeps
        self._local_pages = 0

    def run(self) -> Simulation:
        w = self.workload
        rng = np.random.default_rng(w.seed)
        popularity = np.cumsum(np.arange(1, w.documents + 1) ** -w.zipf)
        document = np.searchsorted(popularity / popularity[-1], rng.random(w.requests))
        tokens = rng.lognormal(np.log(w.document_tokens) - w.document_sigma**2 / 2, w.document_sigma, w.documents)
        turn = np.maximum(1, rng.exponential(w.turn_tokens / w.page_size, (w.requests, w.turns)).astype(int))
        number = rng.integers(w.turns, size=w.requests)
        stored = rng.random(w.requests) < w.hit_rate
        for i in range(w.requests):
            if i == w.requests // 2:
                self.costs = Costs()
                self.segment_lengths.clear()
                self.segment_gets.clear()
            pages = max(1, round(tokens[document[i]] / w.page_size))
            if stored[i]:
                self._request(int(document[i]), pages, [int(n) for n in turn[i, : number[i] + 1]])
            else:  # a document that nobody had before
                self._request(-1, pages, [int(turn[i, 0])])
        return self

    def _request(self, document: int, pages: int, turns: Sequence[int]) -> None:
        """Look a prompt up, read the stored pages, write the others. ``document`` is -1 for a new one."""
        before, new = sum(turns[:-1]), turns[-1]
        total = pages + before + new
        self.costs.requests += 1
        self.costs.prompt_pages += total
        local = self._keep(document, pages)
        found = [] if document < 0 or local else list(buddy_split(0, pages, self._max_pages))
        own = self._segments(pages, turns[:-1])
        asked = total - (pages if local else 0)
        if asked * self.workload.page_size >= _THRESHOLD_TOKENS:
            self._look_up(asked, found=bool(found or own))
            for segment in found:
                self.segment_gets[document, segment[0]] += self._read(segment)
            for segment in own:
                self._read(segment)
        if document < 0:
            self._write(0, total, [])
        else:
            self._write(pages + before, new, own)

    def _segments(self, start: int, turns: Sequence[int]) -> list[Segment]:
        """Return the segments of a conversation's earlier turns."""
        if self.workload.merging:
            return list(buddy_split(start, sum(turns), self._max_pages))
        return [s for i, n in enumerate(turns) for s in buddy_split(start + sum(turns[:i]), n, self._max_pages)]

    def _keep(self, document: int, pages: int) -> bool:
        """Return whether the server has the document, and make it the most recently used one."""
        is_local = self._local.pop(document, None) is not None
        if document >= 0:
            self._local[document] = pages
            self._local_pages += 0 if is_local else pages
            while self._local_pages * self.workload.page_size > self.workload.local_tokens:
                self._local_pages -= self._local.popitem(last=False)[1]
        return is_local

    def _look_up(self, pages: int, found: bool) -> None:
        ranks = self.workload.ranks
        self.costs.index_calls += ranks
        self.costs.index_pages += pages * ranks
        if not found:  # in the index, so the lookup goes by names
            self.costs.gets += pages.bit_length() * ranks
            self.costs.name_gets += pages.bit_length() * ranks

    def _read(self, segment: Segment) -> int:
        """Read a segment's manifest and data. Return the number of GETs, of one rank."""
        _, pages = segment
        spans = [min(self._span_pages, pages - page) for page in range(0, pages, self._span_pages)]
        sizes = [span * self._page_bytes for span in spans]
        gets = 1 + sum(-(-size // ReadSize(self.workload.read_bytes).of(size)) for size in sizes)
        self.costs.gets += gets * self.workload.ranks
        self.costs.read_bytes += sum(sizes) * self.workload.ranks
        self.segment_lengths[pages] += gets
        return gets

    def _write(self, first_page: int, num_pages: int, stored: Sequence[Segment]) -> None:
        """Commit new pages behind the ``stored`` segments, each after a lookup, and merge them with these."""
        self.costs.written_pages += num_pages
        segments = list(stored)
        for segment in buddy_split(first_page, num_pages, self._max_pages):
            self._look_up(segment[1], found=False)
            self._commit(segment[1])
            segments.append(segment)
            while self.workload.merging and self._merge_last(segments, is_read=segments[-1] != segment):
                pass

    def _merge_last(self, segments: list[Segment], *, is_read: bool) -> bool:
        """Merge the last two segments if they are buddies. Return whether they were. ``is_read``: the last one's data
        are in memory, from another merge."""
        ranks = self.workload.ranks
        first_page, pages = segments[-1]
        if not first_page & pages or 2 * pages > self._max_pages:
            return False
        self.costs.gets += ranks  # the left buddy's manifest
        if segments[-2:-1] != [(first_page - pages, pages)]:
            return False
        num_read = 1 if is_read else 2
        self.costs.gets += (num_read + 6) * ranks  # deleting a half takes a GET and two HEADs
        self.costs.deletes += 4 * ranks
        self.costs.read_bytes += num_read * pages * self._page_bytes * ranks
        self.costs.merges += 1
        self._commit(2 * pages)
        segments[-2:] = [(first_page - pages, 2 * pages)]
        return True

    def _commit(self, pages: int) -> None:
        ranks, size = self.workload.ranks, pages * self._page_bytes
        data_puts = 1 if size <= MULTIPART_BYTES else 2 + -(-size // PART_BYTES)  # one begins the parts, one ends them
        self.costs.puts += (data_puts + 1) * ranks
        self.costs.written_bytes += size * ranks
        self.costs.index_calls += ranks
        self.costs.index_entered += pages * ranks
