"""Update a local store's catalog from its directory without delaying lookups.

Scans run one after another on a dedicated thread. They list and read without the store's lock, and take it only to
record a few findings at a time; lookups use the findings recorded so far. Changes by this process are recorded when
they happen and need no scan: ``own_change`` tracks how they change a directory's mtime. If another process makes a
change within the same tick of the file system's clock, it may be missed until that process's next change or the next
collection of orphans, which always scans.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.keys import MANIFEST_SUFFIX
from sgl_kvfetch.stores import files
from sgl_kvfetch.stores.catalog import Catalog, KnownNames, read_manifest

T = TypeVar("T")

# A directory's mtime is coarse: if it is younger than this when read, later changes may leave the same mtime.
YOUNG_S = 1.0
# A long scan is repeated only after this many times its duration, so that scans take at most a tenth of the time.
REST_FACTOR = 10
LONG_SCAN_S = 0.05
# How many findings are recorded before the lock is released for other threads.
_NOTED_AT_ONCE = 32
# Sleep after each release. Without it, this thread would nearly always take the lock again before a waiting thread.
_LET_OTHERS_S = 1e-5


@dataclass(slots=True, eq=False)
class _Seen:
    """The state of a namespace's directory when it was last scanned or changed by this process."""

    mtime_ns: int = -1  # changes up to this mtime are recorded
    trusted: bool = False  # no change with that mtime can have been missed
    own_mtime_ns: int = -1  # the mtime after this process's last change
    took_s: float = 0.0  # duration of the last scan
    rest_until: float = 0.0  # monotonic seconds


@dataclass(frozen=True, slots=True)
class Scan:
    """A queued or running scan."""

    future: Future[StoreError | None]  # resolves to the error if the scan failed
    is_long: bool  # estimated from the last one


class Scanner:
    """Safe to use from several threads. ``lock`` guards the catalog; only ``own_change`` may be used under it."""

    def __init__(self, catalog: Catalog, lock: threading.RLock) -> None:
        self.has_scanned_all = False  # at least once
        self._catalog = catalog
        self._lock = lock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfetch-local-scan")
        self._stopped = False
        self._mutex = threading.Lock()  # guards the fields below; may be taken while holding ``lock``, never vice versa
        self._seen: dict[str, _Seen] = {}
        self._pending: dict[str, Scan] = {}

    def start(self, namespace: str, *, force: bool = False) -> Scan | None:
        """Start a scan if the namespace may have changed and no long scan has just ended. Return None if not needed.

        ``force`` scans without these conditions. If a scan is already queued or running, return it. Raises OSError.
        """
        with self._mutex:
            pending = self._pending.get(namespace)
            if pending is not None or self._stopped:
                return pending
            seen = self._seen.get(namespace)
            mtime_ns = _mtime_ns(self._catalog.root, namespace)
            if mtime_ns is None and seen is None:
                return None
            if mtime_ns is not None and seen is not None and not force:
                settled = seen.trusted and seen.mtime_ns == mtime_ns
                if settled or time.monotonic() < seen.rest_until:
                    return None
            future = self._thread.submit(self._run, namespace)
            scan = Scan(future, is_long=seen is not None and seen.took_s > LONG_SCAN_S)
            self._pending[namespace] = scan
            return scan

    def start_all(self, *, force: bool = False) -> list[Scan]:
        """Call ``start`` for every namespace. Return the scans. Raises OSError."""
        with self._mutex:
            known = list(self._seen)
        scans = (self.start(namespace, force=force) for namespace in {*known, *files.namespaces(self._catalog.root)})
        return [scan for scan in scans if scan is not None]

    def refresh_all(self, *, force: bool = False) -> None:
        """Call ``start_all`` and wait for the scans. Raises StoreError, OSError."""
        self.finish_all([scan.future.result() for scan in self.start_all(force=force)])

    def finish_all(self, results: Sequence[StoreError | None]) -> None:
        """Call this when all scans of a ``start_all`` are done. Raises the first error among their results."""
        for error in results:
            if error is not None:
                raise error
        self.has_scanned_all = True

    @contextmanager
    def own_change(self, namespace: str) -> Iterator[None]:
        """Wrap a change by this process to a namespace's directory, so that it causes no scan. Raises OSError."""
        root = self._catalog.root
        with self._mutex:
            before = _mtime_ns(root, namespace)
            try:
                yield
            finally:
                after = _mtime_ns(root, namespace)
                if after is not None:
                    seen = self._seen.get(namespace)
                    if seen is None:
                        seen = self._seen[namespace] = _Seen(after, trusted=before is None)
                    elif before == seen.mtime_ns:
                        seen.mtime_ns = after
                    seen.own_mtime_ns = after

    def stop(self) -> None:
        """Abort the running scan and end the thread. Idempotent."""
        with self._mutex:
            self._stopped = True
        self._thread.shutdown()

    def _run(self, namespace: str) -> StoreError | None:
        started = time.monotonic()
        error: StoreError | None = None
        try:
            with files.os_errors(f"scanning {namespace}"):
                self._scan(namespace)
        except StoreError as e:
            error = e
        finally:
            took_s = time.monotonic() - started
            with self._mutex:
                del self._pending[namespace]
                seen = self._seen.get(namespace)
                if seen is not None:
                    seen.took_s = took_s
                    seen.rest_until = started + REST_FACTOR * took_s if took_s > LONG_SCAN_S else 0.0
                    seen.trusted = seen.trusted and error is None and not self._stopped
        return error

    def _scan(self, namespace: str) -> None:
        if self._stopped:
            return
        with files.namespace_dir(self._catalog.root, namespace) as directory:
            if directory is None:
                self._forget(namespace)
                return
            with self._mutex:
                seen = self._seen.setdefault(namespace, _Seen())
                seen.mtime_ns = os.fstat(directory).st_mtime_ns
                young = time.time() - seen.mtime_ns / 1e9 <= YOUNG_S
                # Trust our own changes even while they are young. Otherwise a store in use would scan all the time.
                seen.trusted = not young or seen.mtime_ns == seen.own_mtime_ns
            with self._lock:
                known = self._catalog.start_scan(namespace)
            try:
                self._note_differences(namespace, known, directory)
            finally:
                with self._lock:
                    self._catalog.end_scan(namespace)

    def _forget(self, namespace: str) -> None:
        with self._lock:
            if _mtime_ns(self._catalog.root, namespace) is None:  # this process may have created it since
                self._catalog.forget_namespace(namespace)
                with self._mutex:
                    self._seen.pop(namespace, None)

    def _note_differences(self, namespace: str, known: KnownNames, directory: int) -> None:
        """Record what changed. The catalog skips names that this process changed during the scan: it knows better."""
        catalog = self._catalog
        manifests, data, new_data = _list(namespace, known, directory)
        # Data first: a manifest enters the index once all its data is known.
        self._in_steps(list(new_data.items()), lambda found: catalog.found_data(*found))
        changed = [
            (name, status)
            for name, status in manifests.items()
            if known.stamps.get(name) != (status.st_ino, status.st_mtime_ns)
        ]
        for first in range(0, len(changed), _NOTED_AT_ONCE):
            some = [
                (name, read_manifest(catalog.root, name, status))
                for name, status in changed[first : first + _NOTED_AT_ONCE]
            ]
            self._in_steps(some, lambda found: catalog.found_manifest(*found))
        # Removals last: a replaced manifest no longer needs some of the data, and must stay in the index throughout.
        gone = [name for name in known.data if name not in data]
        gone += [name for name in known.stamps if name not in manifests]
        self._in_steps(gone, catalog.lost)

    def _in_steps(self, found: Sequence[T], note: Callable[[T], None]) -> None:
        for first in range(0, len(found), _NOTED_AT_ONCE):
            if self._stopped:
                return
            with self._lock:
                for one in found[first : first + _NOTED_AT_ONCE]:
                    note(one)
            time.sleep(_LET_OTHERS_S)


def _list(
    namespace: str, known: KnownNames, directory: int
) -> tuple[dict[str, os.stat_result], set[str], dict[str, int]]:
    """Return the manifests with their stat, the names of all data, and the sizes of new data. Raises OSError."""
    manifests: dict[str, os.stat_result] = {}
    data: set[str] = set()
    new_data: dict[str, int] = {}
    with os.scandir(directory) as entries:
        for entry in entries:
            name = f"{namespace}/{entry.name}"
            # Known names need not be parsed again, and a data object never changes.
            is_known_data = name in known.data
            if is_known_data or name in known.stamps:
                if not entry.is_file(follow_symlinks=False):
                    continue
            elif not files.is_object(name, entry):
                continue
            try:
                if name.endswith(MANIFEST_SUFFIX):
                    manifests[name] = entry.stat(follow_symlinks=False)
                else:
                    if not is_known_data:
                        new_data[name] = entry.stat(follow_symlinks=False).st_size
                    data.add(name)
            except FileNotFoundError:
                continue  # deleted meanwhile
    return manifests, data, new_data


def _mtime_ns(root: Path, namespace: str) -> int | None:
    """Return a namespace directory's mtime, or None if there is no such directory. Raises OSError."""
    try:
        status = os.stat(root / namespace, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_mtime_ns if stat.S_ISDIR(status.st_mode) else None
