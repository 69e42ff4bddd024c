"""Device mode's access to the store, on one rank."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.dataplane.plane import DataPlane
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plugin.access import Access
from sgl_kvfetch.plugin.device.board import Report
from sgl_kvfetch.plugin.device.copies import Copies
from sgl_kvfetch.plugin.device.lookups import Lookups
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed
from sgl_kvfetch.plugin.device.reads import Reads
from sgl_kvfetch.plugin.device.recompute import Verdicts

logger = logging.getLogger(__name__)


class DeviceBackend:
    """The data plane of one rank, and the threads that feed it."""

    def __init__(
        self,
        config: KVFetchConfig,
        plane: DataPlane,
        pages: DevicePages,
        heads: HeadSlice,
        speed: PrefillSpeed,
        report: Report,
    ) -> None:
        """``plane`` is closed together with this backend. ``report`` gets the result of each piece of work."""
        self.plane = plane
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy")
        self._hash_pool = ThreadPoolExecutor(1, "kvfetch-hash")
        verdicts = Verdicts(config, speed, pages.geometry.page_size)
        self.access = Access(config)
        self.lookups = Lookups(config, plane, verdicts, self._hash_pool, report)
        self.reads = Reads(plane, verdicts, pages, self._hash_pool, report)
        self.copies = Copies(plane, pages, self._copy_pool, report)
        logger.info("kvfetch in device mode: %s, namespace %s: %s", config.store, heads.folder, heads.namespace)
        # docs/decisions/0011-no-early-start.md
        logger.info("kvfetch early start is off: this SGLang's runner cannot wait for a layer to arrive")

    def clear(self) -> None:
        """Delete the segments of this rank from the store, and wait for it. Raises KVFetchError."""
        self.plane.clear()

    def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and processes. Idempotent."""
        self.plane.close()
        for pool in (self._hash_pool, self._copy_pool):
            pool.shutdown(wait=False, cancel_futures=True)
