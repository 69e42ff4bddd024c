"""``kvfetch why``: explain why a prompt, or a request, was not served from a store.

A page hash stands for all tokens before it, so whatever names one of the prompt's hashes is a trace of this prompt: a
segment whose last page has it, an expired one, one behind a gap, one in another server's namespace. The listing has
such names. What left no trace was never written, as far as the store can tell.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from aiohttp import ClientSession
from msgspec import Struct
from prometheus_client.samples import Sample

from sgl_kvfetch.codec import NO_KEYS, Manifest, StoreKeys, decode_manifest
from sgl_kvfetch.codec.container.manifest import checked_namespace
from sgl_kvfetch.errors import ConfigError, FormatError, KVFetchError, StoreError
from sgl_kvfetch.keys import HeadSlice, Labels, Namespace, label_of_request
from sgl_kvfetch.log import printable
from sgl_kvfetch.prompts import Prompt, Tokens, page_hashes
from sgl_kvfetch.reasons import ADVICE, Reason, reason_of
from sgl_kvfetch.status import STATUS_KEY, Decided, ServerStatus
from sgl_kvfetch.stores import AdminStore, Lookup
from sgl_kvfetch.stores.upkeep import StoredSegment, decode_named_manifest, list_segments, whole_pages
from sgl_kvfetch.tools.broken_prefixes import BrokenPrefix, broken_prefixes, lines_of
from sgl_kvfetch.tools.prompts import FileOption, PromptOption, SaltOption, TokenizerOption, prompts_of, tokens_of
from sgl_kvfetch.tools.sglang_server import (
    open_server,
    queued_text,
    server_info,
    server_samples,
    tokenise_on,
    total,
)
from sgl_kvfetch.tools.summary import NamespaceSummary, summarise_namespaces
from sgl_kvfetch.tools.target import require_scheme, run_on_store
from sgl_kvfetch.tools.terminal import STORE_HELP, IndexedAccess, KeyFileOption, json_flag, option, show
from sgl_kvfetch.tools.verify import Verifier
from sgl_kvfetch.types import first_to_last

# The reason for a namespace that differs in a field; the first field in this order counts.
_FIELDS = {
    "model": Reason.OTHER_WEIGHTS,
    "page_size": Reason.OTHER_PAGE_SIZE,
    "quantiser": Reason.OTHER_QUANTISER,
    "model_dtype": Reason.OTHER_FLAGS,
}

_MOST_SHOWN = 3  # requests with a prompt
# Why pages were dropped, by `sgl_kvfetch_written_pages_total`. For the others, writes are counted by reason.
_DROPPED = {
    "dropped_full": "the write queue was full",
    "dropped_invalid": "they have values that cannot be quantised, or SGLang did not report what is before them",
    "dropped_data_plane": "the data plane ended",
}


HashesAt = Callable[[int], list[bytes]]  # the hashes of the prompt's whole pages of so many tokens


class Finding(Struct, frozen=True):
    """Why pages ``first_page`` up to ``end_page`` are not served."""

    reason: Reason
    first_page: int
    end_page: int
    detail: str


class Explained(Struct, frozen=True):
    """What became of one prompt, or of one request. ``namespace``: the digest of the one that was looked into; "" if
    there is none. ``called``: its model and quantiser, for people."""

    num_tokens: int
    num_pages: int
    page_size: int
    namespace: str
    called: str
    stored_pages: int
    findings: list[Finding]
    decided: list[Decided]


@dataclass(frozen=True)
class Asked:
    """What an SGLang server told. ``status``: None if it has no kvfetch. ``is_paused``: whether its lookups pause.
    ``unwritten``: what keeps it from writing, or has done so since its start."""

    page_size: int
    status: ServerStatus | None
    is_paused: bool
    unwritten: list[str]


def why(
    access: IndexedAccess,
    store: Annotated[str | None, typer.Argument(metavar="[STORE]", help=STORE_HELP)] = None,
    prompt: PromptOption = None,
    file: FileOption = None,
    server: Annotated[
        str | None, option("URL", "The SGLang server that should have used the store. Its tokenizer applies.")
    ] = None,
    request: Annotated[
        str | None, option("ID", "One of the server's last 256 requests, by its rid, instead of a prompt.")
    ] = None,
    model: TokenizerOption = None,
    cache_salt: SaltOption = None,
    log: Annotated[Path | None, option("FILE", "A log of requests: find what breaks their prefixes.")] = None,
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, json_flag(list[Explained], list[BrokenPrefix])] = False,
) -> None:
    """Explain why a prompt, or a request, was not served from a store, and what to do about it.

    With --server, the command asks SGLang's /server_info for the namespace and the last requests, and names what is
    in the way of this server. Without it, the namespace that has most of the prompt stands for the server's. The
    command lists the store, and reads and decodes the prompt's segments, which counts as a use of them. A server
    with an API key needs it as SGLANG_API_KEY in the environment.

    With --log, the command names the ten places that cost most in a log of requests: where a prompt parts from an
    earlier one although what follows is the same again, such as a date, an id or a list in its beginning. A line is
    one of SGLang's --log-requests, or JSON with messages, prompt, text or input_ids, also inside request or body.

    The exit code is 0 if nothing is in the way, and 1 if there is a reason.

    Examples:

        kvfetch why --log requests.jsonl

        kvfetch why http://127.0.0.1:8700 --server http://127.0.0.1:30000 --file prompt.txt

        kvfetch why http://127.0.0.1:8700 --server http://127.0.0.1:30000 --request 5f3c0a

        kvfetch why /var/cache/kv --file prompt.txt --model /models/llama
    """
    if (log is None) == (store is None) or (log and (prompt or file or server or request)):
        raise ConfigError("give either STORE and what to look for, or --log, which takes --model alone")
    if log is not None:
        places, num_requests = broken_prefixes(log, model)
        show(places, as_json, lines_of(places, num_requests))
        raise typer.Exit(bool(places))
    assert store is not None
    prompts = prompts_of(prompt, file, required=request is None)
    if request is not None and (prompts or server is None):
        raise ConfigError("--request needs --server, and neither --prompt nor --file")
    keys = StoreKeys.read(key_file)

    async def explain(opened: AdminStore) -> list[Explained]:
        """Return for each prompt, or for the request, why it was not served from the store."""
        asked: Asked | None = None
        if server is None:
            tokenised = tokens_of(prompts, model)
        else:
            url = require_scheme(server).rstrip("/")
            async with open_server(url) as session:
                asked = await ask_status(session, url)
                tokenised = [await _tokens(session, url, each, model) for each in prompts]
        if request is not None:
            assert asked is not None
            return [_request(asked, request)]
        segments = await list_segments(opened, "")
        summaries = await summarise_namespaces(opened, [each for each in segments if each.manifest is not None])
        status = asked.status if asked else None
        explained = []
        for tokens in tokenised:
            diagnosis = Diagnosis(
                opened,
                segments,
                summaries,
                partial(page_hashes, tokens, cache_salt=cache_salt),
                partial(page_hashes, tokens) if cache_salt else None,
                keys,
                status.coarseness if status else 0,
                range(status.first_head, status.end_head) if status else None,
            )
            explained.append(await _explain(diagnosis, len(tokens), asked))
        return explained

    found = run_on_store(store, access, explain)
    lines = _lines if request is None else _request_lines
    show(found, as_json, [line for number, each in enumerate(found) for line in lines(number, each)])
    if any(each.findings for each in found):
        raise typer.Exit(1)


async def _explain(diagnosis: Diagnosis, num_tokens: int, asked: Asked | None) -> Explained:
    """Explain one prompt. Raises StoreError."""
    status = asked.status if asked else None
    wanted = status.namespace if status else await diagnosis.fullest()
    page_size = wanted.page_size if wanted else asked.page_size if asked else diagnosis.only_page_size
    digest = wanted.digest() if wanted else ""
    hashes = diagnosis.hashes_at(page_size) if page_size else []
    decided = [each for each in status.recent if bytes.fromhex(each.first_hash) in hashes] if status else []
    findings = list(_in_the_way(asked, num_tokens, page_size)) if asked else []
    num_stored = 0
    if wanted is None:
        findings += [] if findings else [_with_writes(_not_found(diagnosis, num_tokens, page_size), asked)]
    elif hashes:
        num_stored, finding = await diagnosis.explain(wanted)
        if finding is not None:
            findings.append(_with_memory(_with_writes(finding, asked), decided, hashes))
    last = _of_request(decided[-1], hashes) if decided else None
    # The last request may have been another prompt's, which begins like this one.
    if last is not None and last.reason not in [Reason.DIVERGES, *(f.reason for f in findings)]:
        findings.append(last)
    called = _called(wanted, status.labels if status else _labels_of(diagnosis, digest)) if wanted else ""
    return Explained(num_tokens, len(hashes), page_size, digest, called, num_stored, findings, decided)


def _not_found(diagnosis: Diagnosis, num_tokens: int, page_size: int) -> Finding:
    """Say why no namespace has a prompt's first page."""
    num_pages = num_tokens // page_size if page_size else 0
    if not diagnosis.summaries:
        return Finding(Reason.NEVER_WRITTEN, 0, num_pages, "nothing is stored")
    if num_tokens <= page_size:
        return Finding(Reason.SHORT, 0, num_pages, _too_short(num_tokens, page_size, page_size))
    return Finding(Reason.NEVER_WRITTEN, 0, num_pages, "no namespace has the prompt's first page")


def _in_the_way(asked: Asked, num_tokens: int, page_size: int) -> Iterator[Finding]:
    """Yield why a server does not look for a prompt at all."""
    status, num_pages = asked.status, num_tokens // page_size
    if status is None:
        yield _not_attached(num_pages)
        return
    if not status.reads:
        yield Finding(Reason.NOT_READING, 0, num_pages, "its mode is write_only, or its weights were updated")
    least = max(status.threshold_tokens, page_size)
    if _num_usable(num_tokens, page_size) < least:
        yield Finding(Reason.SHORT, 0, num_pages, _too_short(num_tokens, page_size, least))
    if asked.is_paused:
        yield Finding(Reason.SKIPPED, 0, num_pages, "the server's lookups pause, since the store failed several times")


def _num_usable(num_tokens: int, page_size: int) -> int:
    """SGLang always computes the last token, and so the page with it."""
    return (num_tokens - 1) // page_size * page_size


def _too_short(num_tokens: int, page_size: int, least: int) -> str:
    return f"{_num_usable(num_tokens, page_size)} tokens could be served, and lookups begin at {least}"


def _not_attached(num_pages: int) -> Finding:
    return Finding(Reason.NOT_ATTACHED, 0, num_pages, "the server has no kvfetch backend")


def _with_memory(finding: Finding, decided: Sequence[Decided], hashes: Sequence[bytes]) -> Finding:
    """Return the finding; if the server found these pages before, that they were evicted."""
    if finding.reason not in (Reason.NEVER_WRITTEN, Reason.DIVERGES):
        return finding
    for each in reversed(decided):
        if bytes.fromhex(each.found_hash) in hashes[finding.first_page :]:
            detail = f"the server found them at {when(each.at_s)}: they were evicted or deleted since"
            return Finding(Reason.EVICTED, finding.first_page, finding.end_page, detail)
    return finding


def _with_writes(finding: Finding, asked: Asked | None) -> Finding:
    """Return the finding, with what the server says of its writes if pages were never written, or may not have been:
    they are taken for evicted where later ones are stored, and a prompt that diverges may have been sent before."""
    could_be = Reason.NEVER_WRITTEN, Reason.EVICTED, Reason.DIVERGES
    if asked is None or not asked.unwritten or finding.reason not in could_be:
        return finding
    detail = f"{finding.detail}. Of its writes, the server reports: {'; '.join(asked.unwritten)}"
    return msgspec.structs.replace(finding, detail=detail)


def _of_request(decided: Decided, hashes: Sequence[bytes] = ()) -> Finding | None:
    """Return why a request was not served what was stored; None if it was, or if nothing was. ``hashes``: of the
    prompt's pages, by which the result counts pages; by default, it counts those that were looked up."""
    if not decided.reason:
        return None
    detail = (
        f"at {when(decided.at_s)}, {decided.num_pages} pages were looked up, {decided.num_found} found, and "
        f"{decided.num_served} served"
    )
    first = hashes.index(bytes.fromhex(decided.first_hash)) if hashes else 0
    return Finding(Reason(decided.reason), first + decided.num_served, first + decided.num_pages, detail)


def reason_of_request(asked: Asked, request_id: str, num_tokens: int) -> str:
    """Return the reason why nothing of a request came from the store; "unknown" if the server does not tell."""
    if asked.status is not None:
        label = label_of_request(request_id)
        for each in reversed(asked.status.recent):
            if each.request_id == label:
                return each.reason or ("unknown" if each.num_found else Reason.NEVER_WRITTEN)
    return next((each.reason for each in _in_the_way(asked, num_tokens, asked.page_size)), "unknown")


def _request(asked: Asked, request_id: str) -> Explained:
    """Explain a request from what the server remembers. Raises ConfigError if it does not remember it."""
    status = asked.status
    if status is None:
        return Explained(0, 0, asked.page_size, "", "", 0, [_not_attached(0)], [])
    label = label_of_request(request_id)
    decided = [each for each in status.recent if each.request_id == label]
    if not decided:
        raise ConfigError(
            f"the server remembers no request {label!r}. It remembers the last {len(status.recent)} that it "
            f"looked up: those below prefetch_threshold, or in its memory, are not among them"
        )
    last = decided[-1]
    findings = [] if (why_less := _of_request(last)) is None else [why_less]
    if not findings and last.num_found < last.num_pages:
        detail = "the store did not have them; the prompt, with --file, shows why"
        finding = Finding(Reason.NEVER_WRITTEN, last.num_found, last.num_pages, detail)
        findings = [_with_writes(finding, asked)]
    num_tokens, digest = last.num_pages * asked.page_size, status.namespace.digest()
    called = _called(status.namespace, status.labels)
    about = num_tokens, last.num_pages, asked.page_size, digest, called, last.num_found
    return Explained(*about, findings, decided)


def _called(namespace: Namespace, labels: Labels) -> str:
    return f"{labels.model_name(namespace.model)}, {labels.quantiser_name(namespace.quantiser)}"


def _labels_of(diagnosis: Diagnosis, digest: str) -> Labels:
    """Return the names that the store has for a namespace."""
    summary = next(each for each in diagnosis.summaries if each.digest.startswith(digest))
    return Labels(summary.model or "", summary.quantiser or "")


def _lines(number: int, e: Explained) -> Iterator[str]:
    pages = f"{e.num_pages} pages of {e.page_size}" if e.page_size else "pages of a size that --server would show"
    yield f"prompt {number}: {e.num_tokens} tokens, {pages}"
    if e.namespace:
        yield f"  {e.stored_pages} pages are stored and sound in namespace {e.namespace} ({printable(e.called)})"
    yield from _finding_lines(e)
    for each in e.decided[-_MOST_SHOWN:]:
        outcome = f"{each.num_pages} looked up, {each.num_found} found, {each.num_served} served"
        yield f"  request {printable(each.request_id) or '(no id)'} at {when(each.at_s)}: {outcome}"
    if not e.findings:
        yield "  nothing is in the way: a server of this namespace fetches the prompt if it is not in its memory"


def _request_lines(number: int, e: Explained) -> Iterator[str]:
    for each in e.decided:
        outcome = f"{each.num_pages} pages looked up, {each.num_found} found, {each.num_served} served"
        yield f"at {when(each.at_s)}: {outcome}, in namespace {e.namespace} ({printable(e.called)})"
    yield from _finding_lines(e)


def _finding_lines(e: Explained) -> Iterator[str]:
    for finding in e.findings:
        pages = f"pages {finding.first_page} to {finding.end_page - 1}: " if finding.end_page else ""
        yield f"  {finding.reason}: {pages}{printable(finding.detail)}"
        yield f"    what to do: {ADVICE[finding.reason]}"


# The store


def different_fields(theirs: Namespace, ours: Namespace) -> dict[str, tuple[object, object]]:
    """Return the fields in which namespaces differ, with both values."""
    pairs = {f.name: (getattr(theirs, f.name), getattr(ours, f.name)) for f in fields(Namespace)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def reason_of_difference(names: Mapping[str, object]) -> Reason:
    """Return the reason for namespaces that differ in these fields."""
    return next((reason for name, reason in _FIELDS.items() if name in names), Reason.OTHER_CACHE)


def when(at_s: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass
class Diagnosis:
    """Looks for one prompt in a store."""

    store: AdminStore
    segments: Sequence[StoredSegment]  # all of the store
    summaries: Sequence[NamespaceSummary]  # one per namespace
    hashes_at: HashesAt  # of the prompt
    unsalted_at: HashesAt | None = None  # the same without cache_salt; None if there is none
    keys: StoreKeys = NO_KEYS
    coarseness: int = 0  # as in `Tolerance`
    rank_heads: range | None = None  # of the server's rank; None if there is no server

    @property
    def only_page_size(self) -> int:
        """The page size of all that is stored; 0 if nothing is, or if there are several."""
        sizes = {namespace.page_size for namespace in self._namespaces()}
        return sizes.pop() if len(sizes) == 1 else 0

    async def fullest(self) -> Namespace | None:
        """Return the namespace that has most tokens of the prompt; None if none has its first page."""
        most, fullest = 0, None
        for namespace in self._namespaces():
            num_pages = await self._num_pages(namespace, self.hashes_at(namespace.page_size))
            if num_pages * namespace.page_size > most:
                most, fullest = num_pages * namespace.page_size, namespace
        return fullest

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
        for find in (self._missing_heads, self._traces, self._elsewhere, self._without_salt):
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
        except KVFetchError as e:
            return reason_of(e), str(e)
        stem = manifest.key.stem
        ours = self.keys
        if ours and not manifest.is_encrypted:
            return Reason.ENCRYPTED, f"{stem} is not encrypted, and the key file is not empty"
        if locked := [key for key in manifest.key_ids if ours and key not in ours]:
            return Reason.ENCRYPTED, f"{stem} is encrypted with {', '.join(locked)}; the file has {', '.join(ours.ids)}"
        if found := manifest.too_coarse(self.coarseness):
            return Reason.COARSE, found
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
            detail = f"{behind} segments of this prompt after them are stored: they were, too, or could not be written"
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


# The server


async def ask_status(session: ClientSession, server: str) -> Asked:
    """Ask a server what it tells of itself. Raises ConfigError if it is none of SGLang, and StoreError."""
    info = await server_info(session, server)
    try:
        states = msgspec.convert(info.get("internal_states", []), list[dict[str, Any]])
        statuses = [msgspec.convert(state[STATUS_KEY], ServerStatus) for state in states if STATUS_KEY in state]
        for each in statuses:
            _require_known(each)
    except (msgspec.ValidationError, KVFetchError, ValueError, OverflowError) as e:
        raise ConfigError(f"--server {server} has another version of kvfetch: {e}") from e
    status = None
    if statuses:  # one for each replica of data parallelism, which serve alike
        recent = sorted((each for status in statuses for each in status.recent), key=lambda each: each.at_s)
        status = msgspec.structs.replace(statuses[0], recent=recent)
    samples = await server_samples(session, server)
    is_paused = total(samples, "sgl_kvfetch_store_down") > 0
    return Asked(info["page_size"], status, is_paused, list(_unwritten(status, samples)))


def _require_known(status: ServerStatus) -> None:
    """Raise KVFetchError, ValueError or OverflowError for words that we do not know, and numbers out of bounds."""
    _ = HeadSlice(checked_namespace(asdict(status.namespace)), range(status.first_head, status.end_head)).geometry
    for each in status.recent:
        _ = Reason(each.reason or Reason.LATE), bytes.fromhex(each.first_hash + each.found_hash), when(each.at_s)


def _unwritten(status: ServerStatus | None, samples: Sequence[Sample]) -> Iterator[str]:
    """Yield what keeps a server from writing pages, or has done so since its start."""
    if status is not None and not status.writes:
        yield "it does not write: its mode is read_only, or its weights were updated"
    if status is not None:
        yield from status.unstored
    if queued := queued_text(samples):
        yield queued
    for result, what in _DROPPED.items():
        if num_pages := total(samples, "sgl_kvfetch_written_pages_total", result=result):
            yield f"it has dropped {num_pages:.0f} pages since its start: {what}"
    for reason in Reason:
        if num_writes := total(samples, "sgl_kvfetch_misses_total", stage="write", reason=reason):
            yield f"{num_writes:.0f} writes have failed: {reason} ({ADVICE[reason]})"


async def _tokens(session: ClientSession, server: str, prompt: Prompt, model: str | None) -> Tokens:
    if isinstance(prompt, list) or model is not None:
        (tokens,) = tokens_of([prompt], model)
        return tokens
    return await tokenise_on(session, server, prompt)
