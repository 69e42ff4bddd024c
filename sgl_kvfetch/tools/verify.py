"""``kvfetch verify``: read everything that is stored, and report what is corrupt."""

from __future__ import annotations

import asyncio
import importlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from sgl_kvfetch.codec import NO_KEYS, Cell, Manifest, StoreKeys, open_manifest
from sgl_kvfetch.codec.container.objects import DataObject, Side
from sgl_kvfetch.errors import EncryptedError, FormatError, StoreError
from sgl_kvfetch.keys import ContentCheck, parse_object_name
from sgl_kvfetch.log import printable
from sgl_kvfetch.stores import PROFILES, AdminStore, ObjectInfo, list_profiles, read_profile
from sgl_kvfetch.stores.upkeep import StoredSegment, decode_named_manifest, read_manifest
from sgl_kvfetch.tools.target import StorePart, run_on_part, split_part
from sgl_kvfetch.tools.terminal import (
    KeyFileOption,
    PartArgument,
    StoreAccess,
    format_size,
    how_to_install,
    json_flag,
    make_progress,
    missing_package,
    show,
)

if TYPE_CHECKING:  # these load torch and codecs
    from sgl_kvfetch.codec import SegmentReader, SidePlace
    from sgl_kvfetch.plane.fetch.plan import ReadUnit

MAX_PROBLEMS_AN_OBJECT = 5
MAX_COMMANDS = 20
_MOST_JOBS = 256


def verify(
    store: PartArgument,
    access: StoreAccess,
    key_file: KeyFileOption = None,
    as_json: Annotated[bool, json_flag(Report)] = False,
) -> None:
    """Read and decode everything that is stored, and compare it with its checksums.

    With --key-file, a segment that is not encrypted is a problem, too. Without it, encrypted segments are not decoded,
    only compared with the digests of their bytes as they are stored. So are all segments on a machine without torch and
    the codecs. The profiles of a whole store are checked, too.

    The output ends with commands that delete corrupt segments: servers compute and store those again.

    The exit code is 0 if everything is valid, 1 if something is corrupt or missing, 2 if the store cannot be read.
    Nothing that is stored is changed. Data without a manifest, left by a crashed writer, are counted but are no error.

    Examples:

        kvfetch verify http://127.0.0.1:8700

        kvfetch verify file:///var/cache/kv#4f0c
    """
    keys = StoreKeys.read(key_file)

    async def check(part: StorePart) -> Report:
        report = await _verify(part.store, await part.list_segments(), keys)
        if not part.prefix:
            report.profiles = await _unusable_profiles(part.store, keys)
        return report

    report = run_on_part(store, access, check)
    lines = [*_lines(report), *_next_steps(report, split_part(store)[0])]
    show(report, as_json, lines)
    if report.problems or report.profiles:
        raise typer.Exit(1)


async def _unusable_profiles(store: AdminStore, keys: StoreKeys) -> dict[str, str]:
    """Read all profiles. Return what is wrong with those that cannot be used, by name. Without a key for an encrypted
    one, only its header is read."""
    problems: dict[str, str] = {}
    for listed in await list_profiles(store):
        try:
            if listed.head is None or listed.head.header.encryption is None or keys:
                await read_profile(store, listed, keys)
        except (FormatError, StoreError) as e:
            if not e.concerns_object:
                raise
            if await store.get_note(PROFILES, listed.info.name, 1) is not None:  # not withdrawn meanwhile
                problems[listed.info.name] = str(e)
    return problems


async def _verify(store: AdminStore, segments: list[StoredSegment], keys: StoreKeys) -> Report:
    """Read and check segments, as many at a time as there are cores, and show how far it is."""
    from rich.progress import DownloadColumn, TransferSpeedColumn

    total = sum(segment.stored_bytes for segment in segments if segment.manifest is not None)
    jobs = min(os.cpu_count() or 1, _MOST_JOBS)
    with (
        make_progress("verifying", DownloadColumn(True), TransferSpeedColumn()) as progress,
        ThreadPoolExecutor(jobs, thread_name_prefix="kvfetch-verify") as pool,
    ):
        task = progress.add_task("", total=total)
        verifier = Verifier(
            store, pool, jobs=jobs, keys=keys, on_read=lambda num_bytes: progress.advance(task, num_bytes)
        )
        return await verifier.run(segments)


def _lines(report: Report) -> Iterator[str]:
    """Yield a report as lines: first what is corrupt, then what was read, then what was left out."""
    by_object: dict[str, list[str]] = {}
    for problem in report.problems:
        by_object.setdefault(problem.name, []).append(problem.what)
    for name, found in by_object.items():
        for what in found[:MAX_PROBLEMS_AN_OBJECT]:
            yield f"CORRUPT {name}: {printable(what)}"
        if len(found) > MAX_PROBLEMS_AN_OBJECT:
            yield f"CORRUPT {name}: and {len(found) - MAX_PROBLEMS_AN_OBJECT} more"
    for name, what in report.profiles.items():
        yield f"CORRUPT profile {name}: {printable(what)}"
    read = f"{report.num_segments} segments, {report.num_chunks} chunks, {format_size(report.read_bytes)} read"
    yield f"{read}: {_verdict(report, len(by_object) + len(report.profiles))}"
    if report.orphans:
        size = format_size(sum(info.size_bytes for info in report.orphans))
        yield f"{len(report.orphans)} data objects ({size}) have no manifest: being written, or left by a crash"
    if (package := report.missing_package) is not None:
        yield (
            f"nothing was decoded, only compared with digests: {package} is not installed here "
            f"({how_to_install(package)})"
        )
    if report.num_locked:
        names = ", ".join(report.locking_keys)
        yield f"{report.num_locked} segments are encrypted with {names} (not decoded; see --key-file)"
    if report.num_gone:
        yield f"{report.num_gone} segments were deleted or replaced during the run"


def _verdict(report: Report, num_corrupt: int) -> str:
    """Return what was found, and no more than was looked at."""
    if num_corrupt:
        return f"{num_corrupt} objects corrupt or missing"
    if not report.num_segments:
        return "there was nothing to verify"
    if report.missing_package is not None or report.num_locked:
        return "nothing is corrupt, of what could be checked here"
    return "all is well"


def _next_steps(report: Report, store: str) -> Iterator[str]:
    """Yield what to do about corrupt objects."""
    for name in report.profiles:
        yield f"withdraw the profile, and publish it again: kvfetch profile rm {store} {name.partition('/')[2]}"
    if not report.problems:
        return
    yield "delete what is corrupt, and servers compute and store it again:"
    stems = sorted({parse_object_name(problem.name).segment.stem for problem in report.problems})
    for stem in stems[:MAX_COMMANDS]:
        yield f"  kvfetch clear {shlex.quote(f'{store}#{stem}')}"
    if len(stems) > MAX_COMMANDS:
        yield f"  ... and {len(stems) - MAX_COMMANDS} more segments, which --json names"
    yield "if the disk of the store did it (its kernel's log shows it), start with an empty directory on a healthy one"


@dataclass(frozen=True, slots=True)
class Problem:
    name: str  # of the object
    what: str


@dataclass(slots=True)
class Report:
    """What a store's verification has found."""

    num_segments: int = 0
    num_chunks: int = 0
    read_bytes: int = 0
    num_gone: int = 0  # segments that were deleted or replaced during the run, which is no problem
    num_locked: int = 0  # segments whose key was not given
    missing_package: str | None = None  # why nothing was decoded
    problems: list[Problem] = field(default_factory=list)
    locking_keys: list[str] = field(default_factory=list)  # the ids of keys that were not given
    orphans: list[ObjectInfo] = field(default_factory=list)  # data that no manifest names: being written, or left over
    profiles: dict[str, str] = field(default_factory=dict)  # what is wrong with a profile, by its name


class _Gone(Exception):
    """The segment was deleted or replaced while it was read."""


class _Piece(NamedTuple):
    """Bytes of a data object that are read at once. Each of ``decoders`` decodes a part, and raises FormatError."""

    start: int
    size_bytes: int
    num_chunks: int
    decoders: Sequence[Callable[[bytes], object]]


@dataclass
class Verifier:
    """Verifies ``jobs`` segments at a time. Each job holds one read of about ``read_bytes`` bytes in memory. With
    keys, also requires that all segments are encrypted. Where torch or a codec's library is not
    installed, nothing is decoded: stored bytes are only compared with their digests."""

    store: AdminStore
    decode_pool: Executor
    jobs: int
    keys: StoreKeys = NO_KEYS
    read_bytes: int = 4 << 20
    on_read: Callable[[int], None] = lambda num_bytes: None
    report: Report = field(default_factory=Report)

    async def run(self, segments: Sequence[StoredSegment]) -> Report:
        """Verify ``segments`` and return the report. Raises StoreError if the store cannot be read at all."""
        self.report.missing_package = _missing_package()
        queue = iter(segments)
        await asyncio.gather(*(self._work(queue) for _ in range(self.jobs)))
        self.report.problems.sort(key=lambda problem: problem.name)
        return self.report

    async def _work(self, queue: Iterator[StoredSegment]) -> None:
        for stored in queue:
            if stored.manifest is None:
                self.report.orphans += stored.data.values()
                continue
            try:
                await self._verify_segment(stored, stored.manifest)
            except _Gone:
                self.report.num_gone += 1

    async def _verify_segment(self, stored: StoredSegment, info: ObjectInfo) -> None:
        try:
            content = await self.store.get(info.name)
            if content is None:
                raise _Gone
            self._record_read(info.size_bytes)
            manifest = decode_named_manifest(content, info.name)
            if self.keys and not manifest.is_encrypted:
                self._add(info.name, "is not encrypted")
            pieces = self._pieces(manifest)
        except (FormatError, StoreError) as e:
            self._blame(info.name, e)
            return
        self.report.num_segments += 1
        for data, its_pieces in zip(manifest.data, pieces, strict=True):
            await self._verify_data(stored.data.get(manifest.data_name(data)), manifest, data, its_pieces)
        self.report.orphans += [data for name, data in stored.data.items() if name not in manifest.data_names]

    async def _verify_data(
        self, info: ObjectInfo | None, manifest: Manifest, data: DataObject, pieces: Iterable[_Piece]
    ) -> None:
        """Read a data object piece by piece, decode all of it, and compare it with its digest and size."""
        name, expected = manifest.data_name(data), data.size_bytes
        check = ContentCheck(name)
        try:
            # The segment may have been replaced after the listing; then its data are newer than the listing.
            info = info or await self.store.head(name)
            if info is not None and info.size_bytes != expected:
                self._add(name, f"has {info.size_bytes} bytes, expected {expected} as its manifest says")
                return
            for piece in pieces:
                content = None if info is None else await self.store.get(name, piece.start, piece.size_bytes)
                if content is None:
                    await self._require_present(manifest)
                    self._add(name, "missing, though its manifest names it")
                    return
                self._record_read(len(content))
                check.add(content)
                await self._decode(name, piece, content)
        except StoreError as e:
            self._blame(name, e)
            return
        if not check.is_sound:
            self._add(name, "its bytes do not match the digest in its name")

    async def _decode(self, name: str, piece: _Piece, content: bytes) -> None:
        loop = asyncio.get_running_loop()
        decoding = (loop.run_in_executor(self.decode_pool, decode, content) for decode in piece.decoders)
        self.report.num_chunks += piece.num_chunks
        for result in await asyncio.gather(*decoding, return_exceptions=True):
            if isinstance(result, FormatError):
                self._add(name, str(result))
            elif isinstance(result, BaseException):
                raise result

    def _pieces(self, manifest: Manifest) -> list[Iterator[_Piece]]:
        """Return the pieces of each data object, in the order of the manifest. Raises FormatError."""
        if self.report.missing_package is None:
            try:
                return self._decoded_pieces(open_manifest(manifest, self.keys))
            except EncryptedError:
                self.report.num_locked += 1
                self.report.locking_keys = sorted({*self.report.locking_keys, *manifest.key_ids})
        return [self._stored_pieces(data.size_bytes) for data in manifest.data]

    def _decoded_pieces(self, opened: Manifest) -> list[Iterator[_Piece]]:
        from sgl_kvfetch.codec import quantiser_from_identity
        from sgl_kvfetch.codec.container.reader import all_readers

        quantiser = quantiser_from_identity(opened.namespace.quantiser)
        readers = all_readers(opened, quantiser)
        # What refines these is decoded with them. Its bytes are compared with the digest in its name.
        refining = opened.data[len(readers) : len(opened.data) - len(opened.sides)]
        return [
            *map(self._coded_pieces, readers),
            *(self._stored_pieces(rows.size_bytes) for rows in refining),
            *(self._side_pieces(opened, side) for side in opened.sides),
        ]

    def _coded_pieces(self, reader: SegmentReader) -> Iterator[_Piece]:
        from sgl_kvfetch.plane.fetch.plan import ReadSize, read_units

        for span in range(reader.manifest.num_spans):
            for unit in read_units(reader, span, ReadSize(self.read_bytes)):
                num_chunks = len(unit.cells) * reader.manifest.chunks_per_cell
                ((_, start, end),) = unit.reads
                yield _Piece(start, end - start, num_chunks, [partial(_decode_cell, unit, c) for c in unit.cells])

    def _stored_pieces(self, num_bytes: int) -> Iterator[_Piece]:
        """Yield the pieces of a data object that cannot be decoded, and so is only compared with its digest."""
        for start in range(0, num_bytes, self.read_bytes):
            yield _Piece(start, min(self.read_bytes, num_bytes - start), 0, ())

    def _side_pieces(self, manifest: Manifest, side: Side) -> Iterator[_Piece]:
        from sgl_kvfetch.codec.container.sides import places_in

        run: list[SidePlace] = []
        for place in places_in(manifest, side):
            if run and place.start + place.size_bytes - run[0].start > self.read_bytes:
                yield _side_piece(run)
                run = []
            run.append(place)
        yield _side_piece(run)

    async def _require_present(self, manifest: Manifest) -> None:
        """Raise _Gone unless the store still has exactly this manifest."""
        try:
            if await read_manifest(self.store, manifest.key.manifest_name) == manifest:
                return
        except FormatError:
            pass
        raise _Gone

    def _record_read(self, num_bytes: int) -> None:
        self.report.read_bytes += num_bytes
        self.on_read(num_bytes)

    def _blame(self, name: str, error: FormatError | StoreError) -> None:
        """Report an error that concerns only this object; raise any other."""
        if not error.concerns_object:
            raise error
        self._add(name, str(error))

    def _add(self, name: str, what: str) -> None:
        self.report.problems.append(Problem(name, what))


def _missing_package() -> str | None:
    """Return the name of a package that decoding needs and that is not installed; None if there is none."""
    try:
        from sgl_kvfetch.codec import SegmentReader  # noqa: F401 - its import loads torch and all codecs

        importlib.import_module("av")  # HEVC's codec imports it when it is used
    except ModuleNotFoundError as e:
        return missing_package(e)
    return None


def _side_piece(places: Sequence[SidePlace]) -> _Piece:
    """Return the read of neighbouring side pages."""
    first, last = places[0], places[-1]
    size_bytes = last.start + last.size_bytes - first.start
    num_chunks = sum(len(place.page.chunks) for place in places)
    return _Piece(
        first.start, size_bytes, num_chunks, [partial(_decode_side, p, p.start - first.start) for p in places]
    )


def _decode_side(place: SidePlace, offset: int, content: bytes) -> None:
    """Decode one side page of what was read, and keep nothing of it. Raises FormatError. Runs on the decode pool."""
    for _ in place.decode_chunks(memoryview(content)[offset : offset + place.size_bytes]):
        pass


def _decode_cell(unit: ReadUnit, cell: Cell, content: bytes) -> None:
    """Decode one cell of what was read. Raises FormatError. Runs on the decode pool."""
    unit.reader.decode_cell(cell, unit.split(content)[unit.cells.index(cell)])
