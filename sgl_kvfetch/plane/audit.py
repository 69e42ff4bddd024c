"""Audits: compares what is stored with what the engine computes of the same pages, and stops using what is wrong.

Checksums say that bytes are as they were written. They cannot say that these are the values of this prompt by this
model. A server knows that whenever it computes pages that the store has. So now and then

* **a hit is cut** (`Auditor.served`): its last pages count as not stored. The engine computes them, as it does after
  any hit, and hands them over for writing, as it does with all that it computes; here they are recognised by their
  hashes. So the engine takes part in nothing, and the request pays for 128 tokens of prefill at most;
* **pages are handed over that the store has already** (`Auditor.known`): the engine has computed them all the same,
  because that was sooner, or because another server was first.

Then the stored pages are fetched as any request's are, restored on the CPU and compared, one audit at a time, when
nobody else fetches, on a thread of low priority. The quantiser judges (`Quantiser.error_ratios`): what it should change
itself, and what sums in another order may change, is 1. What is computed behind a cut hit is computed from restored
values, whose errors grow in a few layers and tokens to a hundred times of what is usual there, and mean nothing. So

* the median token counts, of the mean of all layers: 0.4 to 1.1 in sound hits of a real model;
* a layer counts by its median token, and an eighth of that: up to 0.8;
* the model's first layer has no such errors, since it depends on the tokens alone. So what is stored of it is compared
  with what is coded again (`Quantiser.repeat_ratios`), by its median token and a sixth of its worst one: up to 2.4,
  where a cell has many layers. It shows one token that is not restored, which the others do not.

The largest of these is the ratio of an audit.

A few audits beyond ``audit.most`` of the last ten end it: the rank neither finds nor writes anything any more, since
what it wrote would be believed by others. One that is far beyond is another kind of fault, of one segment: that is
deleted. After either, the next hits are audited at once, so that it is soon known which of the two it is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellPlace, CellValues, Quantiser
from sgl_kvfetch.codec.container import Pages, RawPages
from sgl_kvfetch.errors import KVFetchError, why
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane.adapt.pool import lower_priority
from sgl_kvfetch.plane.config import AuditConfig
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, FetchResult
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.sink import Destination, GuardedSink, PagePool, consecutive_runs
from sgl_kvfetch.plane.profiles import cache_folder
from sgl_kvfetch.plane.write.gather import PageBatch, SpanPages
from sgl_kvfetch.plane.write.writer import delete_segment
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.stores import Store
from sgl_kvfetch.types import TENSORS, CellGrid

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_AUDIT_TOKENS = 128  # of an audit, at most, or one page: the mean error of so many varies little
_OF_A_LAYER, _OF_A_TOKEN = 8.0, 6.0  # how much larger the ratio of a layer, or of a token of the first layer, may be
_FAR = 100.0  # a ratio beyond it is no matter of accuracy
_NUM_RECENT, _MOST_BEYOND = 10, 3  # audits that are remembered, and how many of them may be beyond before reads end
_AT_ONCE = 3  # hits that are audited after one that was beyond
_MOST_WANTED = 512  # pages that were cut off hits and have not been handed over
_MOST_PENDING = 4  # audits
_MINUTE_S = 60.0
_MOST_POLLS, _POLL_S = 200, 0.05  # an audit waits 10 s at most for others' fetches
_FETCH_S = 60.0
_NICE = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of an audit. ``ratio``: of errors to those that are expected, where it is largest."""

    ratio: float
    where: str


class FailedAudits(msgspec.Struct, frozen=True):
    """Why a server of this machine uses nothing of a namespace. ``model``, ``quantiser``: names for people.
    ``identity``: of the quantiser."""

    store: str
    model: str
    quantiser: str
    identity: str
    why: str
    at_s: float  # in seconds since the epoch


def verdict_file(store: str, heads: HeadSlice) -> Path:
    """Return where this machine keeps the verdict on what a rank reads from a store. Another profile is another
    namespace, and has none."""
    return cache_folder("audits", heads.namespace.digest(), store) / f"{heads.heads.start}-{heads.heads.stop}.json"


def read_verdict(path: Path) -> FailedAudits | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=FailedAudits)
    return None


def keep_verdict(path: Path, verdict: FailedAudits) -> None:
    """Keep a verdict until a person deletes the file. If it cannot be kept, it holds until the server's end."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(verdict))
    except OSError as e:
        logger.warning("kvfetch: that audits have failed cannot be kept in %s: %s", path, why(e))


def verdicts() -> dict[Path, FailedAudits]:
    """Return the verdicts that this machine keeps."""
    files = sorted(cache_folder("audits", "", "").parent.glob("*/*.json"))
    return {path: verdict for path in files if (verdict := read_verdict(path)) is not None}


class _Kept(PagePool):
    """Keeps the values of a few pages: ``(tokens, layers, heads, dim)``."""

    def __init__(self, like: CellValues, page_size: int) -> None:
        self.values = CellValues(*map(torch.empty_like, like))
        self._page_size = page_size

    def write(self, layers: range, heads: range, pages: Sequence[int], values: CellValues) -> None:
        for whole, x in zip(self.values.cell(layers, heads), values, strict=True):
            size = self._page_size
            for run, positions in consecutive_runs(pages):
                tokens = slice(positions.start * size, positions.stop * size)
                whole[run.start * size : run.stop * size] = x[tokens]


class Auditor:
    """Audits what one rank reads. Belongs to one event loop."""

    def __init__(
        self,
        config: AuditConfig,
        heads: HeadSlice,
        quantiser: Quantiser,
        finder: PageFinder,
        fetcher: Fetcher,
        *,
        store: Store,
        writes: bool,
        on_wrong: Callable[[str], None] = lambda why: None,
    ) -> None:
        """``writes``: whether the engine hands over what it computes; else nothing can be audited. ``on_wrong`` is
        called once, with a sentence that says why nothing is to be read or written any more."""
        self._config = config
        self._heads = heads
        self._geometry = heads.geometry
        self._quantiser = quantiser
        self._finder = finder
        self._fetcher = fetcher
        self._store = store
        self._writes = writes
        self._on_wrong = on_wrong
        self._num_pages = max(1, _AUDIT_TOKENS // self._geometry.page_size)
        self._due = 0.0  # audits
        self._left_bytes, self._minute_ends_s = 0.0, 0.0
        self._wanted: OrderedDict[bytes, PageSource] = OrderedDict()
        self._recent: deque[bool] = deque(maxlen=_NUM_RECENT)  # whether audits were beyond what is expected
        self._tasks = Tasks()
        self._num_pending = 0
        self._one = asyncio.Lock()
        self._random = random.Random(0)
        self._begun: OrderedDict[bytes, None] = OrderedDict()  # pages whose audits have begun
        self._thread = ThreadPoolExecutor(1, "kvfetch-audit", initializer=_yield_to_others)
        self.is_over = False

    def served(self, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> int:
        """Return how many of the pages that were found are to be served: all of them, or, if an audit is due, a few
        less. Those are audited once the engine hands them over."""
        num_pages = min(len(sources), self._num_pages)
        if not num_pages or not self._writes or not self._is_due(num_pages):
            return len(sources)
        first = len(sources) - num_pages
        for page_hash, source in zip(hashes[first:], sources[first:], strict=False):
            self._wanted[page_hash] = source
        while len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)
        return first

    def handed_over(self, batch: PageBatch) -> None:
        """Audit the pages among these that were cut off a hit."""
        if self._wanted:
            sources = [self._wanted.pop(page_hash, None) for page_hash in batch.page_hashes]
            wanted = [i for i, source in enumerate(sources) if source is not None]
            if wanted:
                first, end = wanted[0], wanted[-1] + 1
                found = [source for source in sources[first:end] if source is not None]
                if len(found) == end - first:
                    self._begin(batch, first, found)

    def known(self, segment: PageBatch) -> None:
        """Audit a part of a segment that the store has, if one is due."""
        num_pages = min(len(segment.page_hashes), self._num_pages)
        is_coded = any(span.chunks for span in segment.spans)
        if not is_coded and self._begun.keys().isdisjoint(segment.page_hashes) and self._is_due(num_pages):
            self._begin(segment, self._random.randrange(len(segment.page_hashes) - num_pages + 1), None, num_pages)

    def _is_due(self, num_pages: int) -> bool:
        """Count a hit, or a segment. Return whether so many of its pages are to be audited."""
        num_bytes, now_s = num_pages * self._geometry.page_bytes, time.monotonic()
        self._due = min(float(_AT_ONCE), self._due + self._config.share)
        if now_s >= self._minute_ends_s:
            # An audit of one page may be more than the bound; it is then the only one of its minute.
            self._left_bytes, self._minute_ends_s = float(self._config.per_minute), now_s + _MINUTE_S
        fits = self._left_bytes >= min(num_bytes, self._config.per_minute)
        if self.is_over or self._due < 1 or not fits or self._num_pending >= _MOST_PENDING:
            return False
        self._due -= 1
        self._left_bytes -= num_bytes
        return True

    def _begin(
        self, batch: PageBatch, first: int, sources: Sequence[PageSource] | None, num_pages: int | None = None
    ) -> None:
        num_pages = len(sources) if sources is not None else num_pages or 0
        hashes = batch.page_hashes[first : first + num_pages]
        place = range(batch.first_page + first, batch.first_page + first + num_pages)
        pieces = _pieces(batch, range(first, first + num_pages))
        self._num_pending += 1
        self._begun.update(dict.fromkeys(hashes))
        while len(self._begun) > _MOST_WANTED:
            self._begun.popitem(last=False)
        self._tasks.begin(self._audit(hashes, place, pieces, sources))

    async def close(self) -> None:
        await self._tasks.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def join(self) -> None:
        """Wait for all audits that have begun."""
        await self._tasks.join()

    def _run(self, compute: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._thread, compute)

    async def _audit(
        self, hashes: Sequence[bytes], pages: range, pieces: list[Pages], sources: Sequence[PageSource] | None
    ) -> None:
        """``pages``: in the sequence. ``pieces``: their values; dropped once they are copied, which frees their place
        in the write queue."""
        result = "failed"
        try:
            computed = await self._run(partial(self._values, pieces, pages))
            pieces.clear()
            async with self._one:
                if sources is None:
                    sources = await self._finder.find_pages(hashes, _FETCH_S, pages.start)
                await self._wait_for_others()
                pool = _Kept(computed, self._geometry.page_size)
                fetched = await self._fetcher.fetch(
                    sources, Destination(range(len(sources)), GuardedSink(pool)), _FETCH_S
                )
                if fetched.num_pages == len(hashes):
                    coarser = 3.0 ** max(self._fetcher.levels.most_left_out, sources[0].reader.levels_left_out)
                    about = self._quantiser, self._heads, self._tokens(pages), coarser
                    audited = await self._run(partial(compare, computed, pool.values, *about))
                    result = self._judge(audited, sources[0].reader.stem)
                    if result == "far":
                        await self._delete(hashes, sources)
        except (KVFetchError, TimeoutError) as e:
            logger.debug("kvfetch: an audit failed: %s", e)
        except Exception:
            logger.exception("kvfetch: an audit failed")
        finally:
            self._num_pending -= 1
            metrics.AUDITS.labels(result).inc()

    async def _delete(self, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> None:
        """Delete the segments of some pages, so that they are written again. Raises StoreError."""
        self._finder.fetched(hashes, sources, FetchResult())
        for part in span_parts(sources):
            self._fetcher.drop_kept(part.reader.data_name)
        for reader in {part.reader.stem: part.reader for part in span_parts(sources)}.values():
            manifest = reader.manifest
            await delete_segment(self._store, manifest)
            metrics.DELETED_SEGMENTS.inc()
            writer = manifest.labels.model_name(manifest.namespace.model)
            logger.warning("kvfetch: deleted the segment %s, which a server of %r wrote", reader.stem, writer)

    async def _wait_for_others(self) -> None:
        for _ in range(_MOST_POLLS):
            if not self._fetcher.is_busy:
                break
            await asyncio.sleep(_POLL_S)

    def _tokens(self, pages: range) -> range:
        return range(pages.start * self._geometry.page_size, pages.stop * self._geometry.page_size)

    def _values(self, pieces: Sequence[Pages], pages: range) -> CellValues:
        """Return a copy of pages' values."""
        size, common = self._geometry.page_size, (self._geometry.num_layers, self._geometry.num_heads)
        shapes = ((len(pages) * size, *common, self._geometry.head_dim(t)) for t in TENSORS)
        values = CellValues(*(torch.empty(shape, dtype=self._geometry.torch_dtype) for shape in shapes))
        first = pages.start
        for piece in pieces:
            tokens = self._tokens(range(first, first + piece.num_tokens // size))
            into = values.tokens(slice(tokens.start - pages.start * size, tokens.stop - pages.start * size))
            if isinstance(piece, RawPages):
                for whole, x in zip(into, piece, strict=True):
                    whole.copy_(x.flatten(0, 1))
            else:
                quantiser, begin = self._quantiser, piece.pages.start * size
                for parts, (layers, heads, place) in zip(
                    piece.cells, places_of(self._quantiser, self._heads, tokens), strict=True
                ):
                    some = quantiser.some_tokens(parts, slice(begin, begin + len(tokens)))
                    restored = quantiser.dequantise(some, values.k.dtype, place)
                    for whole, x in zip(into.cell(layers, heads), restored, strict=True):
                        whole.copy_(x)
            first += piece.num_tokens // size
        return values

    def _judge(self, audited: Compared, stem: str) -> str:
        """Take in what was found of pages of a segment. Return the result, for the metrics."""
        metrics.AUDIT_RATIO.observe(audited.ratio)
        is_beyond, is_far = audited.ratio > self._config.most, audited.ratio > _FAR
        self._recent.append(is_beyond)
        if not is_beyond:
            return "sound"
        self._due = float(_AT_ONCE)
        what = (
            f"in {audited.where}, errors are {audited.ratio:.3g} times as large as {self._quantiser.identity} should "
            f"make them; at most {self._config.most:g} times are expected (audit.most)"
        )
        _limited.warning("beyond", f"kvfetch: an audit of {stem}: {what}")
        if sum(self._recent) >= _MOST_BEYOND and not self.is_over:
            self.is_over = True
            self._wanted.clear()
            self._on_wrong(f"{sum(self._recent)} of the last {len(self._recent)} audits: {what}")
        return "far" if is_far else "beyond"


def compare(
    computed: CellValues,
    restored: CellValues,
    quantiser: Quantiser,
    heads: HeadSlice,
    tokens: range,
    coarser: float = 1.0,
) -> Compared:
    """Compare a rank's values, ``(tokens, layers, heads, dim)``. ``tokens``: in the sequence. ``coarser``: as in
    `Quantiser.error_ratios`."""
    found: list[torch.Tensor] = []
    ratios: dict[str, float] = {}
    for layers, head_block, place in places_of(quantiser, heads, tokens):
        own, stored = (x.cell(layers, head_block) for x in (computed, restored))
        found.append(quantiser.error_ratios(own, stored, place, coarser))
        for tensor, of_layers in zip(TENSORS, found[-1].median(2).values, strict=True):
            for layer, ratio in zip(place.layers, of_layers.tolist(), strict=True):
                where = f"{tensor.upper()} of layer {layer}"
                ratios[where] = max(ratios.get(where, 0.0), ratio / _OF_A_LAYER)
        if not place.layers[0] and coarser == 1:
            for tensor, of_layers in zip(TENSORS, quantiser.repeat_ratios(own, stored, place), strict=True):
                ratio = max(of_layers[0].median().item(), of_layers[0].max().item() / _OF_A_TOKEN)
                where = f"{tensor.upper()} of the first layer"
                ratios[where] = max(ratios.get(where, 0.0), ratio)
    ratios["all layers"] = torch.cat([x.flatten(0, 1) for x in found]).mean(0).median().item()
    where = max(ratios, key=lambda each: ratios[each])
    return Compared(ratios[where], where)


def places_of(quantiser: Quantiser, rank: HeadSlice, tokens: range) -> list[tuple[range, range, CellPlace]]:
    """Return the rank's layers and heads of each cell, and its place in the model, for some tokens of the sequence."""
    geometry, first_layer, first_head = rank.geometry, rank.namespace.first_layer, rank.heads.start
    num_heads = geometry.num_heads
    grid = CellGrid(geometry.num_layers, num_heads, quantiser.cell_layers, quantiser.cell_heads or num_heads)
    found = []
    for group, block in grid.cells():
        layers, heads = grid.layers(group), grid.heads(block)
        place = CellPlace(_shifted(layers, first_layer), _shifted(heads, first_head), tokens)
        found.append((layers, heads, place))
    return found


def _pieces(batch: PageBatch, pages: range) -> list[Pages]:
    """Return what a batch has of some of its pages."""
    found: list[Pages] = []
    begin = 0
    for piece in batch.pieces:
        for each in piece.pieces if isinstance(piece, SpanPages) else (piece,):
            count = _num_pages(each)
            lo, hi = max(pages.start, begin), min(pages.stop, begin + count)
            if lo < hi:
                found.append(each.some(slice(lo - begin, hi - begin)))
            begin += count
    return found


def _num_pages(pages: Pages) -> int:
    return len(pages.k) if isinstance(pages, RawPages) else len(pages.pages)


def _shifted(which: range, by: int) -> range:
    return range(which.start + by, which.stop + by)


def _yield_to_others() -> None:
    use_one_thread()
    lower_priority(_NICE)
