"""The storage backends to compare: their flags, how to know that writes have ended, and what they read."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.server_facts import kvfetch_traffic
from benchmarks.stats import Traffic
from harness.engine import SGLangServer, hicache_args
from harness.metrics import read_metric

_POLL_S = 0.25
_QUIET_S = 2.0  # pages may wait in SGLang's host pool and queues, where no counter shows them
_SETTLE_S = 600.0

PREFETCH_THRESHOLD_TOKENS = 16


class Backend(ABC):
    """``fills``: a separate server fills the storage before the measured phase."""

    name: str
    description: str
    fills: bool = True
    flags: Sequence[str] = ()
    env: Mapping[str, str] = {}

    @abstractmethod
    def progress(self, server: SGLangServer) -> Hashable | None:
        """Return a value that stays equal once all writes have ended, or None while writes certainly run."""

    @abstractmethod
    def read(self, before: str, after: str, storage_tokens: int, page_size: int) -> Traffic:
        """Return the bytes read between two texts of ``/metrics``."""

    def stored(self, before: str, after: str) -> dict[str, int]:
        """Return what the fill stored, for the report."""
        return {}


class NoStorage(Backend):
    name = "none"
    description = "HiCache off; the radix cache in the device pool is on, as by default"
    fills = False

    def progress(self, server: SGLangServer) -> Hashable | None:
        return 0

    def read(self, before: str, after: str, storage_tokens: int, page_size: int) -> Traffic:
        return Traffic(0, 0)


class FileStorage(Backend):
    """SGLang's own file backend: one file per page and rank."""

    name = "file"

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.description = "SGLang's file backend: raw pages in a local directory"
        flags = hicache_args("http://unused")
        extra = json.dumps({"prefetch_threshold": PREFETCH_THRESHOLD_TOKENS})
        self.flags = [
            *flags[: flags.index("--hicache-storage-backend")],
            *("--hicache-storage-backend", "file"),
            *("--hicache-storage-backend-extra-config", extra),
        ]
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory)}

    def progress(self, server: SGLangServer) -> Hashable | None:
        return self._usage()

    def read(self, before: str, after: str, storage_tokens: int, page_size: int) -> Traffic:
        """Return the raw bytes: the bytes of one page, of all ranks, times the number of pages that hit."""
        num_pages, num_bytes = self._usage()
        read_bytes = storage_tokens // page_size * (num_bytes // num_pages if num_pages else 0)
        return Traffic(read_bytes, read_bytes)

    def stored(self, before: str, after: str) -> dict[str, int]:
        num_bytes = self._usage()[1]
        return {"wire_bytes": num_bytes, "raw_bytes": num_bytes}

    def _usage(self) -> tuple[int, int]:
        """Return the numbers of pages and bytes. File names begin with the page's hash, and each rank has a file."""
        sizes = [(path.name.partition("_")[0], path.stat().st_size) for path in self._directory.glob("*.bin")]
        return len({page for page, _ in sizes}), sum(size for _, size in sizes)


class KVFetchStorage(Backend):
    name = "kvfetch"

    def __init__(self, store_url: str, config: Mapping[str, Any]) -> None:
        settings = ", ".join(f"{key} {config.get(key, default)}" for key, default in _SHOWN.items())
        self.description = f"this project's backend: {settings}, over {store_url}"
        self.flags = hicache_args(store_url, **{"prefetch_threshold": PREFETCH_THRESHOLD_TOKENS} | dict(config))

    def progress(self, server: SGLangServer) -> Hashable | None:
        text = server.metrics()
        if read_metric(text, "sgl_kvfetch_queued_bytes", queue="write") > 0:
            return None
        names = ("sgl_kvfetch_written_pages_total", "sglang:backuped_tokens_total")
        return tuple(read_metric(text, name) for name in names)

    def read(self, before: str, after: str, storage_tokens: int, page_size: int) -> Traffic:
        return kvfetch_traffic(before, after)

    def stored(self, before: str, after: str) -> dict[str, int]:
        pages = {
            f"pages_{result}": round(read_metric(after, "sgl_kvfetch_written_pages_total", result=result))
            for result in ("stored", "known", "dropped_full", "dropped_invalid", "dropped_error")
        }
        return vars(kvfetch_traffic(before, after, "write")) | pages


_SHOWN = {"quantiser": "exact", "codec": "hevc"}


def wait_until_settled(backend: Backend, server: SGLangServer) -> float:
    """Wait for the background writes to end; return how long it took, in seconds. Raises TimeoutError."""
    started_s = changed_s = time.monotonic()
    seen: Hashable | None = None
    while True:
        now = backend.progress(server)
        now_s = time.monotonic()
        if now is None or now != seen:
            seen, changed_s = now, now_s
        elif now_s - changed_s >= _QUIET_S:
            return changed_s - started_s
        if now_s - started_s > _SETTLE_S:
            raise TimeoutError(f"the writes of {backend.name} have not ended after {_SETTLE_S:g} s")
        time.sleep(_POLL_S)
