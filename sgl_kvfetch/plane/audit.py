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

* the median token counts, of the mean of all layers, but no more than four times the quarter of layers with the least
  errors. One token may become a sink of attention or not, as its sums were rounded, and then all tokens behind it
  differ, from some layer on, as much as those of other weights. Faults are in the first layers, too;
* a layer counts by its median token, and an eighth of that;
* what is lost may be no more than a share of how tokens vary, a bound that no profile moves: a profile comes from the
  store, as values do, and says itself how large errors are to be;
* the model's first layer has no such errors, since it depends on the tokens alone. So what is stored of it is compared
  with what is coded again (`Quantiser.repeat_ratios`), by its median token and a sixth of its worst one. It shows one
  token that is not restored, which the others do not.

The largest of these is the ratio of an audit.

A few audits of different pages beyond ``audit.most``, of the last ten, end it: the rank neither finds nor writes
anything any more, since what it wrote would be believed by others. One that is far beyond may be another kind of fault,
of one segment. After either, the next hits are audited at once. Until then nobody knows whether the segment or this
server is wrong, so the segment is a *suspect*: it is not served here. If the audit of another segment is sound, so is
the server, and suspects are deleted; if the server is wrong, it ends without having deleted anything.

The first of the three, what is *typical*, varies little between audits. So its median over the last twenty shows what
one audit cannot: a profile that fits other prompts better, or weights that changed a little. That is *drift*: it is
told, and ends nothing.

The ranks of a model serve a hit alike, as far as all of them found it. So the first rank alone counts hits and cuts
them. The engine computes the same pages on all ranks, and each one compares its own.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from msgspec import Meta

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellPlace, CellValues, Pages, Quantiser, RawPages
from sgl_kvfetch.codec.quant.base import ratio as ratio_of
from sgl_kvfetch.errors import KVFetchError, why
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import LimitedLogger
from sgl_kvfetch.plane.arena import StridedPages
from sgl_kvfetch.plane.config import AuditConfig
from sgl_kvfetch.plane.fetch.fetcher import Fetcher, PoolPages
from sgl_kvfetch.plane.fetch.finder import PageFinder
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.pool import lower_priority
from sgl_kvfetch.plane.profiles import cache_folder
from sgl_kvfetch.plane.write.gather import PageBatch, SpanPages
from sgl_kvfetch.plane.write.writer import delete_segment
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.status import DRIFTS, RECENT_AUDITS, Audits, length_of
from sgl_kvfetch.stores import Store
from sgl_kvfetch.types import TENSORS, CellGrid, TensorName
from sgl_kvfetch.user_files import replace_file

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_AUDIT_TOKENS = 128  # of an audit, at most, or one page: the mean error of so many varies little
_OF_A_LAYER, _OF_A_TOKEN = 8.0, 6.0  # how much larger the ratio of a layer, or of a token of the first layer, may be
_OF_A_QUARTER = 4.0  # how much larger the ratio of all layers may be than that of the quarter with the least errors
# What counts as 1, as a share of how tokens vary. Of SmolLM2, `klt` loses 0.02 of K and 0.04 of V at its default, and
# 0.3 and 0.8 at its coarsest step; without what tokens differ by, 0.5 and 1 are lost.
_MOST_LOST: dict[TensorName, float] = {"k": 0.11, "v": 0.21}
_LEAST_VARYING, _LEAST_VARIATION = 16, 0.5  # tokens, and how much of V varies, as a share of its square
_DUE_AT_START = 0.5  # of an audit: most faults come with a restart, so the first audit is sooner than the next ones
_FAR = 100.0  # a ratio beyond it is no matter of accuracy
_NUM_RECENT, _MOST_BEYOND = 10, 3  # audits that are remembered, and how many may be beyond before reads end
_AT_ONCE = 3  # hits that are audited after one that was beyond
_NUM_KEPT = 200  # audits that a machine remembers of a rank, for what is typical
_MOST_WANTED = 512  # pages that were cut off hits, here or by the first rank, and have not been handed over
_MOST_PENDING = 4  # audits
_MINUTE_S = 60.0
_MOST_POLLS, _POLL_S = 200, 0.05  # an audit waits 10 s at most for others' fetches
_FETCH_S = 60.0
_NICE = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of an audit: ratios of errors to those that are expected. ``ratio``: where it is largest. ``typical``:
    of all layers, which varies little from audit to audit."""

    ratio: float
    where: str
    typical: float


class AuditedPart(msgspec.Struct, frozen=True, array_like=True):
    """A sound audit, or one that was not: what `AuditRecord` keeps of it. ``end_token``: of its last token."""

    at_s: float
    end_token: int
    typical: float


class AuditRecord(msgspec.Struct, frozen=True):
    """What the audits of a rank on this machine have found. ``model``, ``quantiser``: names for people. ``identity``:
    of the quantiser. ``parts``: of the last ones, the newest last. ``ratio``, ``where``: of the last one. ``why_off``:
    why nothing of the namespace is used any more; "" if it is used."""

    store: str
    model: str
    quantiser: str
    identity: str
    num_audits: int = 0
    ratio: float = 0.0
    where: str = ""
    parts: Annotated[list[AuditedPart], Meta(max_length=_NUM_KEPT)] = []
    why_off: str = ""
    off_at_s: float = 0.0  # in seconds since the epoch

    def and_also(self, audited: Compared, end_token: int) -> AuditRecord:
        part = AuditedPart(time.time(), end_token, audited.typical)
        return msgspec.structs.replace(
            self,
            num_audits=self.num_audits + 1,
            ratio=audited.ratio,
            where=audited.where,
            parts=[*self.parts, part][-_NUM_KEPT:],
        )

    def summary(self) -> Audits:
        """Return what a server tells of its audits: medians of the last ones, of those before, and by length."""
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.off_at_s))
        off = f"{self.why_off} (found on {at})" if self.why_off else ""
        about = Audits(model=self.model, quantiser=self.quantiser, off=off)
        if not self.parts:
            return about
        former, recent = self.parts[:-RECENT_AUDITS], self.parts[-RECENT_AUDITS:]
        kinds: dict[str, list[float]] = {}
        for part in sorted(self.parts, key=lambda each: each.end_token):
            kinds.setdefault(length_of(part.end_token), []).append(part.typical)
        return msgspec.structs.replace(
            about,
            num_audits=self.num_audits,
            at_s=recent[-1].at_s,
            ratio=self.ratio,
            where=self.where,
            typical=statistics.median(part.typical for part in recent),
            num_recent=len(recent),
            before=statistics.median(part.typical for part in former) if former else None,
            by_length={kind: statistics.median(found) for kind, found in kinds.items()},
        )


def record_file(store: str, heads: HeadSlice) -> Path:
    """Return where this machine keeps what audits have found of what a rank reads from a store. Another profile is
    another namespace, and has none."""
    return cache_folder("audits", heads.namespace.digest(), store) / f"{heads.heads.start}-{heads.heads.stop}.json"


def read_record(path: Path) -> AuditRecord | None:
    with suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(path.read_bytes(), type=AuditRecord)
    return None


def keep_record(path: Path, record: AuditRecord) -> None:
    """Keep what audits have found until a person deletes the file, and also what another server of this machine has
    said there of why nothing is used. If it cannot be kept, it holds until the server's end."""
    if not record.why_off and (kept := read_record(path)) is not None:
        record = msgspec.structs.replace(record, why_off=kept.why_off, off_at_s=kept.off_at_s)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(path, msgspec.json.encode(record))
    except OSError as e:
        _limited.warning("keep", f"kvfetch: what audits have found cannot be kept in {path}: {why(e)}")


def audit_records() -> dict[Path, AuditRecord]:
    """Return what this machine keeps of ranks' audits, by file, the last audited first."""
    files = sorted(cache_folder("audits", "", "").parent.glob("*/*.json"))
    found = {path: record for path in files if (record := read_record(path)) is not None}
    return dict(sorted(found.items(), key=lambda each: -each[1].summary().at_s))


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
        file: Path,
        cuts: bool = True,
        record: AuditRecord | None = None,
        on_audit: Callable[[], None] = lambda: None,
    ) -> None:
        """``writes``: whether the engine hands over what it computes; else nothing can be audited. ``file``: what this
        machine remembers. ``cuts``: whether this rank cuts hits, as the first one does for all. ``record``: if it
        remembers nothing. ``on_audit`` is called on the loop after each audit: once the record says ``why_off``,
        nothing is to be read or written any more."""
        self._config = config
        self._heads = heads
        self._geometry = heads.geometry
        self._quantiser = quantiser
        self._finder = finder
        self._fetcher = fetcher
        self._store = store
        self._writes = writes
        self._cuts = cuts
        self._file = file
        self._on_audit = on_audit
        self.record = read_record(file) or record or AuditRecord("", "", quantiser.identity, quantiser.identity)
        self._suspects: dict[str, tuple[list[bytes], list[PageSource]]] = {}  # by segment
        self._num_pages = max(1, _AUDIT_TOKENS // self._geometry.page_size)
        self._due = _DUE_AT_START  # audits
        self._left_bytes, self._minute_ends_s = 0.0, 0.0
        self._wanted: OrderedDict[bytes, PageSource] = OrderedDict()
        # Whether audits were beyond what is expected, by the last page that they compared: the same pages, of a prompt
        # that is asked again and again, are no further evidence.
        self._recent: OrderedDict[bytes, bool] = OrderedDict()
        self._tasks = Tasks()
        self._num_pending = 0
        self._one = asyncio.Lock()
        self._random = random.Random(0)
        self._begun: OrderedDict[bytes, None] = OrderedDict()  # pages whose audits have begun
        self._thread = ThreadPoolExecutor(1, "kvfetch-audit", initializer=_yield_to_others)

    @property
    def is_over(self) -> bool:
        return bool(self.record.why_off)

    def served(self, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> int:
        """Return how many of the pages that were found are to be served: all of them, or, if an audit is due, a few
        less. Those are audited once the engine hands them over. No page of a suspect is served, nor one behind it."""
        if self._suspects:
            stems = (any(x.reader.stem in self._suspects for x in (source, *source.others)) for source in sources)
            sources = sources[: next((i for i, is_suspect in enumerate(stems) if is_suspect), len(sources))]
        num_pages = min(len(sources), self._num_pages)
        if not num_pages or not self._writes or self.is_over or (self._cuts and not self._is_due(num_pages)):
            return len(sources)
        first = len(sources) - num_pages
        for page_hash, source in zip(hashes[first:], sources[first:], strict=False):
            self._wanted[page_hash] = source
            self._wanted.move_to_end(page_hash)
        while len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)
        return first if self._cuts else len(sources)

    def handed_over(self, batch: PageBatch) -> None:
        """Audit the pages among these that were cut off a hit."""
        if self._wanted:
            sources = [self._wanted.pop(page_hash, None) for page_hash in batch.page_hashes]
            wanted = [i for i, source in enumerate(sources) if source is not None]
            if wanted:
                first, end = wanted[0], wanted[-1] + 1
                found = [source for source in sources[first:end] if source is not None]
                if len(found) == end - first and (self._cuts or self._fits(len(found))):
                    self._begin(batch, first, found)

    def known(self, segment: PageBatch) -> None:
        """Audit a part of a segment that the store has, if one is due."""
        num_pages = min(len(segment.page_hashes), self._num_pages)
        is_coded = any(span.chunks for span in segment.spans)
        if not is_coded and self._begun.keys().isdisjoint(segment.page_hashes) and self._is_due(num_pages):
            self._begin(segment, self._random.randrange(len(segment.page_hashes) - num_pages + 1), None, num_pages)

    def _is_due(self, num_pages: int) -> bool:
        """Count a hit, or a segment. Return whether so many of its pages are to be audited."""
        self._due = min(float(_AT_ONCE), self._due + self._config.share)
        if self._due < 1 or not self._fits(num_pages):
            return False
        self._due -= 1
        return True

    def _fits(self, num_pages: int) -> bool:
        """Return whether so many pages may be audited now, and count them."""
        num_bytes, now_s = num_pages * self._geometry.page_bytes, time.monotonic()
        if now_s >= self._minute_ends_s:
            # An audit of one page may be more than the bound; it is then the only one of its minute.
            self._left_bytes, self._minute_ends_s = float(self._config.per_minute), now_s + _MINUTE_S
        fits = self._left_bytes >= min(num_bytes, self._config.per_minute)
        if self.is_over or not fits or self._num_pending >= _MOST_PENDING or not self._config.share:
            return False
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
                restored = CellValues(*map(torch.empty_like, computed))
                pool = StridedPages([x.view(-1, self._geometry.page_size, *x.shape[1:]) for x in restored])
                fetched = await self._fetcher.fetch(sources, PoolPages(pool, range(len(sources))), _FETCH_S)
                if fetched.num_pages == len(hashes):
                    coarser = 3.0 ** max(self._fetcher.levels.most_left_out, sources[0].reader.levels_left_out)
                    about = self._quantiser, self._heads, self._tokens(pages), coarser
                    audited = await self._run(partial(compare, computed, restored, *about))
                    result = self._judge(audited, hashes, sources)
                    await self._run(partial(self._note, audited, self._tokens(pages).stop))
                    self._on_audit()
                    if result == "sound":
                        await self._delete_suspects()
        except (KVFetchError, TimeoutError) as e:
            logger.debug("kvfetch: an audit failed: %s", e)
        except Exception:
            logger.exception("kvfetch: an audit failed")
        finally:
            self._num_pending -= 1
            metrics.AUDITS.labels(result).inc()

    async def _delete_suspects(self) -> None:
        """Delete the segments that are wrong, since this server is not, so that they are written again. Raises
        StoreError."""
        while self._suspects and not self.is_over:
            _, (hashes, sources) = self._suspects.popitem()
            self._finder.fetched(hashes, ())
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

    def _note(self, audited: Compared, end_token: int) -> None:
        self.record = self.record.and_also(audited, end_token)
        keep_record(self._file, self.record)
        metrics.AUDIT_TYPICAL.labels(length_of(end_token)).observe(audited.typical)
        found = self.record.summary()
        if found.num_recent == RECENT_AUDITS:
            metrics.AUDIT_DRIFT.set(found.typical)
        if found.drifts:
            _limited.warning("drift", f"kvfetch: audits: {found.says}, beyond {DRIFTS:g}; {found.advice}")

    def _judge(self, audited: Compared, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> str:
        """Take in what was found of pages of a segment. Return the result, for the metrics."""
        metrics.AUDIT_RATIO.observe(audited.ratio)
        is_beyond, is_far = audited.ratio > self._config.most, audited.ratio > _FAR
        self._recent[hashes[-1]] = is_beyond
        self._recent.move_to_end(hashes[-1])
        if len(self._recent) > _NUM_RECENT:
            self._recent.popitem(last=False)
        if not is_beyond:
            return "sound"
        self._due = float(_AT_ONCE)
        stem = sources[0].reader.stem
        if is_far:
            self._suspects[stem] = list(hashes), list(sources)
        what = (
            f"in {audited.where}, errors are {audited.ratio:.3g} times as large as {self._quantiser.identity} should "
            f"make them; at most {self._config.most:g} times are expected (audit.most)"
        )
        _limited.warning("beyond", f"kvfetch: an audit of {stem}: {what}")
        if (num_beyond := sum(self._recent.values())) >= _MOST_BEYOND and not self.is_over:
            self._wanted.clear()
            self._suspects.clear()
            sentence = f"{num_beyond} of the last {len(self._recent)} audits: {what}"
            self.record = msgspec.structs.replace(self.record, why_off=sentence, off_at_s=time.time())
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
    for tensor, share in _lost_shares(computed, restored).items():
        ratios[f"{tensor.upper()}, beside how it varies"] = share / _MOST_LOST[tensor]
    each = torch.cat([x.flatten(0, 1) for x in found])
    typical = each.mean(0).median().item()
    quarter = each.kthvalue(-(-len(each) // 4), 0).values.median().item()
    ratios["all layers"] = min(typical, _OF_A_QUARTER * quarter)
    where = max(ratios, key=lambda each: ratios[each])
    return Compared(ratios[where], where, typical)


def _lost_shares(computed: CellValues, restored: CellValues) -> dict[TensorName, float]:
    """Return the squared error of the median token as a share of its distance from the mean of all, in the median
    layer. Where all that tokens differ by is lost, it is 1. Nothing is returned of few tokens, nor of those that are
    much alike, as in a run of blanks: beside what they differ by, sound errors are large."""
    own = CellValues(*(x.float() for x in computed))
    varies = CellValues(*(_median_square(x - x.mean(0)) for x in own))
    if len(own.v) < _LEAST_VARYING or not (varies.v / _median_square(own.v)).nanmedian() >= _LEAST_VARIATION:
        return {}
    errors = (_median_square(x - y.float()) for x, y in zip(own, restored, strict=True))
    return {t: ratio_of(*x).median().item() for t, *x in zip(TENSORS, errors, varies, strict=True)}


def _median_square(x: torch.Tensor) -> torch.Tensor:
    """Return the squared length of the median token in each layer. ``x``: ``(tokens, layers, heads, dim)``."""
    return x.square().sum((2, 3)).median(0).values


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
