"""The storage backends to compare: their flags, how to know that writes have ended, and what they read."""

from __future__ import annotations

import json
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harness.engine import SGLangServer, hicache_args
from harness.metrics import Traffic, kvfetch_traffic, read_metric
from harness.store_process import StoreProcess

BACKENDS = ("none", "file", "kvfetch")
PREFETCH_THRESHOLD_TOKENS = 16
_POLL_S = 0.25
_QUIET_S = 2.0  # pages may wait in SGLang's host pool and queues, where no counter shows them
_SETTLE_S = 600.0


class Backend:
    """No storage. ``fills``: a separate server fills the storage before the measured phase."""

    name = "none"
    description = "HiCache off; the radix cache in the device pool is on, as by default"
    fills = False
    flags: Sequence[str] = ()
    env: Mapping[str, str] = {}

    def progress(self, server: SGLangServer) -> Hashable | None:
        """Return a value that stays equal once all writes have ended, or None while writes certainly run."""
        return 0

    def stored(self, before: str, after: str) -> dict[str, int]:
        """Return what was stored between two texts of ``/metrics``."""
        return {}

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        """Return the bytes read between two texts of ``/metrics``. ``storage_pages``: how many pages hit."""
        return Traffic(0, 0)


class FileStorage(Backend):
    """SGLang's own file backend: one file per page and rank."""

    name = "file"
    description = "SGLang's file backend: raw pages in a local directory"
    fills = True

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        flags = hicache_args("http://unused", host_pool_gb=1)
        self.flags = [
            *flags[: flags.index("--hicache-storage-backend")],
            *("--hicache-storage-backend", "file"),
            "--hicache-storage-backend-extra-config",
            json.dumps({"prefetch_threshold": PREFETCH_THRESHOLD_TOKENS}),
        ]
        self.env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory)}

    def progress(self, server: SGLangServer) -> Hashable | None:
        return self._usage()

    def stored(self, before: str, after: str) -> dict[str, int]:
        num_bytes = self._usage()[1]
        return {"wire_bytes": num_bytes, "raw_bytes": num_bytes}

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        """Return the raw bytes: the bytes of one page, of all ranks, times the number of pages that hit."""
        num_pages, num_bytes = self._usage()
        read_bytes = storage_pages * (num_bytes // max(1, num_pages))
        return Traffic(read_bytes, read_bytes)

    def _usage(self) -> tuple[int, int]:
        """Return the numbers of pages and bytes. File names begin with the page's hash, and each rank has a file."""
        sizes = [(path.name.partition("_")[0], path.stat().st_size) for path in self._directory.glob("*.bin")]
        return len({page for page, _ in sizes}), sum(size for _, size in sizes)


class KVFetchStorage(Backend):
    name = "kvfetch"
    fills = True

    def __init__(self, store_url: str, config: Mapping[str, Any]) -> None:
        shown = {"quantiser": "exact", "codec": "hevc", **config}
        settings = ", ".join(f"{key} {value}" for key, value in shown.items())
        self.description = f"this project's backend: {settings}, over {store_url}"
        config = {"prefetch_threshold": PREFETCH_THRESHOLD_TOKENS, "host_pool_gb": 1, **config}
        self.flags = hicache_args(store_url, **config)

    def progress(self, server: SGLangServer) -> Hashable | None:
        text = server.metrics()
        if read_metric(text, "sgl_kvfetch_queued_bytes", queue="write") > 0:
            return None
        names = ("sgl_kvfetch_written_pages_total", "sglang:backuped_tokens_total")
        return tuple(read_metric(text, name) for name in names)

    def stored(self, before: str, after: str) -> dict[str, int]:
        pages = {
            f"pages_{result}": round(read_metric(after, "sgl_kvfetch_written_pages_total", result=result))
            for result in ("stored", "known", "dropped_full", "dropped_invalid", "dropped_error")
        }
        return vars(kvfetch_traffic(before, after, "write")) | pages

    def read(self, before: str, after: str, storage_pages: int) -> Traffic:
        return kvfetch_traffic(before, after)


@contextmanager
def open_backend(name: str, store: str | None, config: Mapping[str, Any]) -> Iterator[Backend]:
    """Yield a backend with an empty storage. ``store``: for kvfetch, the URL of a running store; None starts one."""
    with TemporaryDirectory(prefix="kvfetch-bench-", ignore_cleanup_errors=True) as folder:
        if name == "none":
            yield Backend()
        elif name == "file":
            yield FileStorage(Path(folder))
        elif store is not None:
            yield KVFetchStorage(store, config)
        else:
            args = ["--token-file", config["token_file"]] if "token_file" in config else []
            with StoreProcess(folder, extra_args=args) as process:
                yield KVFetchStorage(process.url, config)


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
