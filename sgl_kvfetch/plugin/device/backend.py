"""What device mode does in the background: its parts, their threads, and their end. Nothing here touches SGLang's tree.

The scheduler's thread calls. Only ``clear`` and ``close`` wait.
"""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.loop import LoopThread
from sgl_kvfetch.plugin.access import Access
from sgl_kvfetch.plugin.client import count_miss, open_client, open_encoders
from sgl_kvfetch.plugin.device.board import Report
from sgl_kvfetch.plugin.device.copies import Copies
from sgl_kvfetch.plugin.device.lookups import Lookups
from sgl_kvfetch.plugin.device.pages import DevicePages
from sgl_kvfetch.plugin.device.prefill import PrefillSpeed
from sgl_kvfetch.plugin.device.reads import Reads
from sgl_kvfetch.plugin.device.recompute import Verdicts
from sgl_kvfetch.quant import Quantiser

logger = logging.getLogger(__name__)

_START_S = 30.0
_DECODE_BYTES = 64 << 20  # of frames and values on their way into the pool


class DeviceBackend:
    """The store's client of one rank, with its threads."""

    def __init__(
        self,
        config: KVFetchConfig,
        pages: DevicePages,
        heads: HeadSlice,
        quantiser: Quantiser,
        speed: PrefillSpeed,
        report: Report,
        nvdec: Nvdec | None = None,
    ) -> None:
        """``speed``: of the engine. ``report`` is told what each piece of work has come to."""
        self._config = config
        self._heads = heads
        self._quantiser = quantiser
        self._closed = False
        self._encoders = open_encoders(config)
        self._encode_pool = ThreadPoolExecutor(config.codec_threads, "kvfetch-encode")
        self._copy_pool = ThreadPoolExecutor(1, "kvfetch-copy")
        self._hash_pool = ThreadPoolExecutor(1, "kvfetch-hash")
        self._loop = LoopThread("kvfetch")
        try:
            self._loop.run(self._start(nvdec), _START_S)
        except BaseException:
            self._loop.close()
            raise
        finder, fetcher = self._client.finder, self._client.fetcher
        verdicts = Verdicts(config, fetcher, speed, pages.geometry.page_size)
        self.access = Access(config)
        self.lookups = Lookups(config, self._loop, finder, verdicts, self._hash_pool, report)
        self.reads = Reads(config, self._loop, fetcher, finder, verdicts, pages, self._hash_pool, report)
        self.copies = Copies(config, pages, self._client.writer, self._copy_pool, report)
        logger.info("kvfetch in device mode: %s, namespace %s: %s", config.store, heads.folder, heads.namespace)
        # docs/decisions/0011-no-early-start.md
        logger.info("kvfetch early start is off: this SGLang's runner cannot wait for a layer that is on its way")

    async def _start(self, nvdec: Nvdec | None) -> None:
        self._client = open_client(
            self._config,
            self._heads,
            self._quantiser,
            encode_pool=self._encode_pool,
            on_lookup_fault=partial(count_miss, "lookup"),
            encoders=self._encoders,
            nvdec=nvdec,
            decode_bytes=_DECODE_BYTES,
        )

    def clear(self) -> None:
        """Delete the segments of this rank from the store. Waits. Raises KVFetchError, TimeoutError."""
        self._client.clear(self._loop, self._heads)

    def close(self) -> None:
        """Write what is queued, within a few seconds, and release threads and sockets. Idempotent."""
        if not self._closed:
            self._closed = True
            self._client.close(self._loop, (self._hash_pool, self._copy_pool, self._encode_pool))
