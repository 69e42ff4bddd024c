"""Audits: compares what is stored with what the engine computes of the same pages, and stops using what is wrong.

Checksums say that bytes are as they were written. They cannot say that these are the values of this prompt by this
model. A server knows that whenever it computes pages that the store has. So now and then

* **a hit is cut** (`Auditor.served`): its last pages count as not stored. The engine computes them, as it does after
  any hit, and hands them over for writing, as it does with all that it computes; here they are recognised by their
  hashes. So the engine takes part in nothing, and the request pays for 128 tokens of prefill at most;
* **pages are handed over that the store has already** (`Auditor.known`): the engine has computed them all the same,
  because that was sooner, or because another server was first.

Then the stored pages are fetched as any request's are, restored on the CPU and compared (`comparison`), one audit at a
time, when nobody else fetches, on a thread of low priority. The largest ratio of an error to what is expected is the
ratio of an audit.

**After an audit beyond what is expected**, nobody knows whether the segment or this server is wrong. The segment
becomes a *suspect*, which is not served here, and the next hits are audited at once. A sound audit of another segment
shows that the server is right, and suspects are deleted. Three audits beyond, of different segments among the last ten,
mean one of two things, told apart by who wrote the segments:

* *A writer is wrong*: they are of one writer, and segments of another one are sound. That writer's segments are not
  served for a while. A segment says itself who wrote it, so an attacker may write under many names and never have
  three under one; but each of these segments becomes a suspect, and this server goes on as long as others' are sound.
* *This server may be wrong*: no other writer's segments are sound. The rank is *off*: it finds and writes nothing,
  since what it wrote would be believed by others. After a while, which doubles each time, it *tries again*: it looks
  up, serves nothing, and audits each hit. Three sound audits, or one of another writer, and it goes on as before.

What is *typical* of an audit varies little. So its median over the last twenty shows what one audit cannot: a profile
that fits other prompts better, or weights that changed a little. That is *drift*: it is told, and ends nothing.

The ranks of a model serve a hit alike, as far as all of them found it. So the first rank alone counts hits and cuts
them. The engine computes the same pages on all ranks, and each one compares its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import math
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
from msgspec import Meta

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellValues, Pages, RawPages, SegmentReader, decode_manifest
from sgl_kvfetch.errors import KVFetchError, why
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import LimitedLogger, printable
from sgl_kvfetch.metrics import record_reason
from sgl_kvfetch.plane.comparison import Compared, compare
from sgl_kvfetch.plane.fetch.fetcher import PoolPages
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.pool import lower_priority
from sgl_kvfetch.plane.profiles import cache_folder
from sgl_kvfetch.plane.store import StoreClient
from sgl_kvfetch.plane.write.gather import PageBatch, SpanPages
from sgl_kvfetch.plane.write.writer import delete_segment
from sgl_kvfetch.processes import use_one_thread
from sgl_kvfetch.protocol import StridedPages, cell_places
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.side_by_side import Tasks
from sgl_kvfetch.status import DRIFTS, RECENT_AUDITS, Audits, length_of
from sgl_kvfetch.types import TENSORS
from sgl_kvfetch.user_files import replace_file

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

_MOST_RATIO = 4.0  # how many times as large as expected errors may be
_AUDIT_TOKENS = 128  # of an audit, at most, or one page: the mean error of so many varies little
_FIRST = 0.5  # of the hits between two audits: most faults come with a restart, so the first audit is sooner
_NUM_RECENT, _MOST_BEYOND = 10, 3  # audits that are remembered, and how many may be beyond before reads end
_NUM_SOUND = 3  # audits that must be sound before a server that tries again goes on
_BACK_OFF_S, _MOST_BACK_OFF_S = 600.0, 86400.0  # from the end of reads to the first and the later times to try again
_AT_ONCE = 3  # hits that are audited after one that was beyond
_NUM_KEPT = 200  # audits that a machine remembers of a rank, for what is typical
_MOST_WANTED = 512  # pages that were cut off hits, here or by the first rank, and have not been handed over
_MOST_PENDING = 4  # audits
_MOST_BYTES, _MINUTE_S = 256 << 20, 60.0  # of values, that are compared in a minute
_MOST_POLLS, _POLL_S = 200, 0.05  # an audit waits 10 s at most for others' fetches
_FETCH_S = 60.0
_NICE = 10

T = TypeVar("T")


class AuditedPart(msgspec.Struct, frozen=True, array_like=True):
    """A sound audit, or one that was not: what `AuditRecord` keeps of it. ``end_token``: of its last token."""

    at_s: float
    end_token: int
    typical: float


class AuditRecord(msgspec.Struct, frozen=True):
    """What the audits of a rank on this machine have found."""

    store: str
    model: str  # for people, as is `quantiser`
    quantiser: str
    identity: str  # of the quantiser
    num_audits: int = 0
    ratio: float = 0.0  # the largest ratio of the last audit
    where: str = ""  # the place of that ratio
    parts: Annotated[list[AuditedPart], Meta(max_length=_NUM_KEPT)] = []  # of the last audits, the newest last
    why_off: str = ""  # why nothing of the namespace is used; "" if it is used
    off_at_s: float = 0.0  # when that began the last time, in seconds since the epoch
    num_off: int = 0  # how many times in a row that began

    @property
    def try_again_s(self) -> float:
        """When to try again, in seconds since the epoch."""
        doublings = min(max(0, self.num_off - 1), 16)
        return self.off_at_s + min(_MOST_BACK_OFF_S, _BACK_OFF_S * 2.0**doublings)

    def turned_off(self, sentence: str) -> AuditRecord:
        now_s = time.time()
        # Long after it went on again, it is another fault.
        is_in_a_row = now_s < self.try_again_s + _MOST_BACK_OFF_S
        num_off = self.num_off + 1 if is_in_a_row else 1
        return msgspec.structs.replace(self, why_off=sentence, off_at_s=now_s, num_off=num_off)

    def off_as(self, other: AuditRecord) -> AuditRecord:
        """Return this record with what ``other`` says of why nothing is used."""
        off = {name: getattr(other, name) for name in ("why_off", "off_at_s", "num_off")}
        return msgspec.structs.replace(self, **off)

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


def keep_record(path: Path, change: Callable[[AuditRecord | None], AuditRecord]) -> AuditRecord | None:
    """Change what this machine remembers of a rank, and return it; None if it cannot be kept. Servers of one machine
    share the file, so they wait for each other here."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with path.with_name(f"{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record = change(read_record(path))
            replace_file(path, msgspec.json.encode(record))
            return record
    except OSError as e:
        _limited.warning("keep", f"kvfetch: what audits have found cannot be kept in {path}: {why(e)}")
        return None


def audit_records() -> dict[Path, AuditRecord]:
    """Return what this machine keeps of ranks' audits, by file, the last audited first."""
    files = sorted(cache_folder("audits", "", "").parent.glob("*/*.json"))
    found = {path: record for path in files if (record := read_record(path)) is not None}
    return dict(sorted(found.items(), key=lambda each: -each[1].summary().at_s))


class Auditor:
    """Audits what one rank reads. Belongs to one event loop."""

    def __init__(
        self,
        share: float,
        heads: HeadSlice,
        client: StoreClient,
        file: Path,
        *,
        cuts: bool = True,
        record: AuditRecord | None = None,
        on_audit: Callable[[], None] = lambda: None,
    ) -> None:
        """``share``: of hits, and of computed segments that the store has; 0 if the engine does not hand over what it
        computes. ``file``: what this machine remembers. ``cuts``: whether this rank cuts hits, as the first one does
        for all. ``record``: if it remembers nothing. ``on_audit`` is called on the loop after each audit, and when this
        rank tries again."""
        self._share = share
        self._heads = heads
        self._geometry = heads.geometry
        self._quantiser = quantiser = client.writer.quantiser
        self._finder, self._fetcher, self._store = client.finder, client.fetcher, client.store
        self._cuts = cuts
        self._file = file
        self._on_audit = on_audit
        self.record = read_record(file) or record or AuditRecord("", "", quantiser.identity, quantiser.identity)
        self.is_trying = False
        self._suspects: dict[str, tuple[list[bytes], SegmentReader]] = {}  # by data: it may be written again, and right
        self._distrusted: dict[str, float] = {}  # until when, by writer
        self._num_pages = max(1, _AUDIT_TOKENS // self._geometry.page_size)
        self._random = random.Random()  # nobody who writes can tell which hits are audited
        self._hits_to_first = self._random.randint(1, math.ceil(_FIRST / share)) if share else 0
        self._num_due = 0  # audits
        self._left_bytes, self._minute_ends_s = 0.0, 0.0
        self._wanted: OrderedDict[bytes, PageSource] = OrderedDict()
        # The writer of audited pages, and whether they were beyond what is expected, by segment: that of a prompt that
        # is asked again and again is no further evidence.
        self._recent: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._tasks = Tasks()
        self._num_pending = 0
        self._one = asyncio.Lock()
        self._begun: OrderedDict[bytes, None] = OrderedDict()  # pages whose audits have begun
        self._thread = ThreadPoolExecutor(1, "kvfetch-audit", initializer=_yield_to_others)
        self._timer: asyncio.TimerHandle | None = None
        if self.is_over:
            self._try_again_later()

    @property
    def is_over(self) -> bool:
        """Whether nothing is read and written, but perhaps audited."""
        return bool(self.record.why_off)

    def _try_again_later(self) -> None:
        self.is_trying = False
        if not self._share:
            return  # nothing would tell whether it may go on
        wait_s = min(max(0.0, self.record.try_again_s - time.time()), _MOST_BACK_OFF_S)
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._try_again)

    def _try_again(self) -> None:
        self.is_trying = True
        self._recent.clear()
        self._on_audit()

    def served(self, hashes: Sequence[bytes], sources: Sequence[PageSource], is_divisible: bool = True) -> int:
        """Return how many of the pages that were found are to be served: all of them, or, if an audit is due, a few
        less. Those are audited once the engine hands them over. No page of a suspect, or of a writer who is not
        trusted, is served, nor one behind it; and none at all while this rank tries again. ``is_divisible``: whether
        some are of use without the others; if not, no audit cuts them."""
        num_found = len(sources)
        if self._suspects or self._distrusted:
            sources = sources[: next((i for i, source in enumerate(sources) if self._is_doubtful(source)), num_found)]
        most = 0 if self.is_trying else len(sources)
        if most < num_found:
            record_reason(Reason.AUDITED)
        num_pages = min(len(sources), self._num_pages)
        is_audited = self._share and num_pages and (self.is_trying or (is_divisible and not self.is_over))
        if not is_audited or (self._cuts and not self._is_due(num_pages)):
            return most
        first = len(sources) - num_pages
        for page_hash, source in zip(hashes[first:], sources[first:], strict=False):
            self._wanted[page_hash] = source
            self._wanted.move_to_end(page_hash)
        while len(self._wanted) > _MOST_WANTED:
            self._wanted.popitem(last=False)
        if not self._cuts:
            return most
        record_reason(Reason.AUDIT)
        return min(most, first)

    def _is_doubtful(self, source: PageSource) -> bool:
        readers = [each.reader for each in (source, *source.others)]
        if any(self._distrusted.get(writer_of(reader), 0.0) > time.monotonic() for reader in readers):
            return True
        return any(reader.data_name in self._suspects for reader in readers)

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
        """Draw whether so many pages of a hit, or of a segment, are to be audited."""
        self._hits_to_first -= 1
        if self._random.random() < self._share or not self._hits_to_first:
            self._num_due = min(_AT_ONCE, self._num_due + 1)
        if not (self._num_due or self.is_trying) or not self._fits(num_pages):
            return False
        self._num_due = max(0, self._num_due - 1)
        return True

    def _fits(self, num_pages: int) -> bool:
        """Return whether so many pages may be audited now, and count them."""
        num_bytes, now_s = num_pages * self._geometry.page_bytes, time.monotonic()
        if now_s >= self._minute_ends_s:
            # An audit of one page may be more than the bound; it is then the only one of its minute.
            self._left_bytes, self._minute_ends_s = float(_MOST_BYTES), now_s + _MINUTE_S
        fits = self._left_bytes >= min(num_bytes, _MOST_BYTES)
        is_off = self.is_over and not self.is_trying
        if is_off or not fits or self._num_pending >= _MOST_PENDING or not self._share:
            return False
        self._left_bytes -= num_bytes
        return True

    def _begin(
        self, batch: PageBatch, first: int, sources: Sequence[PageSource] | None, num_pages: int | None = None
    ) -> None:
        num_pages = len(sources) if sources is not None else num_pages or 0
        hashes = batch.page_hashes[first : first + num_pages]
        place = range(batch.first_page + first, batch.first_page + first + num_pages)
        pieces = _pieces(batch, range(first, first + num_pages), self._geometry.page_size)
        self._num_pending += 1
        self._begun.update(dict.fromkeys(hashes))
        while len(self._begun) > _MOST_WANTED:
            self._begun.popitem(last=False)
        self._tasks.begin(self._audit(hashes, place, pieces, sources))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._tasks.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

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
                    coarser = self._fetcher.tolerance.step(sources[0].reader)
                    about = self._quantiser, self._heads, self._tokens(pages), coarser
                    audited = await self._run(partial(compare, computed, restored, *about))
                    result = self._judge(audited, hashes, sources)
                    await self._run(partial(self._keep, audited, self._tokens(pages).stop))
                    self._on_audit()
                    if result == "sound":
                        await self._delete_suspects()
                else:
                    logger.debug("kvfetch: an audit failed: %d of %d pages were read", fetched.num_pages, len(hashes))
        except (KVFetchError, TimeoutError) as e:
            logger.debug("kvfetch: an audit failed: %s", e)
        except Exception:
            logger.exception("kvfetch: an audit failed")
        finally:
            self._num_pending -= 1
            metrics.AUDITS.labels(result).inc()

    async def _delete_suspects(self) -> None:
        """Delete the segments that are wrong, since this server is not, so that they are written again. Raises
        KVFetchError."""
        while self._suspects and not self.is_over:
            data_name, (hashes, reader) = next(iter(self._suspects.items()))
            self._finder.fetched(hashes, ())
            self._fetcher.reads.drop_kept(data_name)
            stored = await self._store.get(reader.manifest.key.manifest_name)
            # Another server may have deleted it, and written it again.
            if stored is not None and data_name in decode_manifest(stored).data_names:
                await delete_segment(self._store, reader.manifest)
                writer = printable(writer_of(reader)) or "an unknown server"
                logger.warning("kvfetch: deleted the segment %s, which %s wrote", reader.stem, writer)
            self._suspects.pop(data_name, None)

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
                    piece.cells, cell_places(self._quantiser, self._heads, tokens), strict=True
                ):
                    some = quantiser.some_tokens(parts, slice(begin, begin + len(tokens)))
                    restored = quantiser.dequantise(some, values.k.dtype, place)
                    for whole, x in zip(into.cell(layers, heads), restored, strict=True):
                        whole.copy_(x)
            first += piece.num_tokens // size
        return values

    def _keep(self, audited: Compared, end_token: int) -> None:
        own = self.record

        def add(kept: AuditRecord | None) -> AuditRecord:
            record = (kept or own).and_also(audited, end_token)
            # Why another server of this machine is off stays.
            is_ours = bool(own.why_off) or record.off_at_s == own.off_at_s
            return record.off_as(own) if is_ours else record

        self.record = (keep_record(self._file, add) or add(own)).off_as(own)
        metrics.AUDIT_TYPICAL.labels(length_of(end_token)).observe(audited.typical)
        found = self.record.summary()
        if found.num_recent == RECENT_AUDITS:
            metrics.AUDIT_DRIFT.set(found.typical)
        if found.drifts:
            _limited.warning("drift", f"kvfetch: audits: {found.says}, above {DRIFTS:g}; {found.advice}")

    def _judge(self, audited: Compared, hashes: Sequence[bytes], sources: Sequence[PageSource]) -> str:
        """Take in what was found of pages of a segment. Return the result, for the metrics."""
        is_beyond = audited.ratio > _MOST_RATIO
        parts = span_parts(sources)
        writers = {writer_of(part.reader) for part in parts}
        writer = writers.pop() if len(writers) == 1 else ""
        stem = sources[-1].reader.stem
        self._recent[stem] = writer, is_beyond
        self._recent.move_to_end(stem)
        if len(self._recent) > _NUM_RECENT:
            self._recent.popitem(last=False)
        if is_beyond:
            self._num_due = _AT_ONCE
            self._suspects |= {part.reader.data_name: (list(hashes), part.reader) for part in parts}
            what = (
                f"in {audited.where}, errors are {audited.ratio:.3g} times as large as {self._quantiser.identity} "
                f"should make them; at most {_MOST_RATIO:g} times are expected"
            )
            _limited.warning("beyond", f"kvfetch: an audit of {stem}: {what}")
            self._act_on(writer, what)
        elif self.is_trying and (self._agrees_with_others or self._num_recent(False) >= _NUM_SOUND):
            self.is_trying = False
            self.record = msgspec.structs.replace(self.record, why_off="")
        return "beyond" if is_beyond else "sound"

    def _act_on(self, writer: str, what: str) -> None:
        """Read nothing of a writer, or nothing at all, if too many of the last audits were beyond."""
        if self._agrees_with_others:
            if self._num_recent(True, writer) >= _MOST_BEYOND:
                now_s = time.monotonic()
                self._distrusted = {each: until for each, until in self._distrusted.items() if until > now_s}
                self._distrusted[writer] = now_s + _BACK_OFF_S
                for stem in [stem for stem, (who, _) in self._recent.items() if who == writer]:
                    del self._recent[stem]
                name = printable(writer) or "unknown servers"
                logger.warning("kvfetch: nothing that %s wrote is read for %g s: %s", name, _BACK_OFF_S, what)
        elif (num_beyond := self._num_recent(True)) >= _MOST_BEYOND and (self.is_trying or not self.is_over):
            self._wanted.clear()
            self.record = self.record.turned_off(f"{num_beyond} of the last {len(self._recent)} audits: {what}")
            self._try_again_later()

    @property
    def _agrees_with_others(self) -> bool:
        """Whether another writer's segments are what this server computes. Its own do not show that it is right."""
        wrong = {who for who, is_beyond in self._recent.values() if is_beyond}
        return any(who not in wrong and who != self._heads.labels.writer for who, _ in self._recent.values())

    def _num_recent(self, is_beyond: bool, writer: str | None = None) -> int:
        return sum(found == is_beyond and writer in (None, who) for who, found in self._recent.values())


def writer_of(reader: SegmentReader) -> str:
    """Return who says to have written a segment; "" if nobody does, or several did."""
    return reader.manifest.labels.writer


def _pieces(batch: PageBatch, pages: range, page_size: int) -> list[Pages]:
    """Return what a batch has of some of its pages."""
    found: list[Pages] = []
    begin = 0
    for piece in batch.pieces:
        for each in piece.pieces if isinstance(piece, SpanPages) else (piece,):
            count = each.num_tokens // page_size
            lo, hi = max(pages.start, begin), min(pages.stop, begin + count)
            if lo < hi:
                found.append(each.some(slice(lo - begin, hi - begin)))
            begin += count
    return found


def _yield_to_others() -> None:
    use_one_thread()
    lower_priority(_NICE)
