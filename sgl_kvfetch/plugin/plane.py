"""Starts the data plane of this process's engine."""

from __future__ import annotations

from collections.abc import Mapping

from sgl_kvfetch.codecs.base import FrameEncoder
from sgl_kvfetch.codecs.nvdec import Nvdec
from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.dataplane.client import StoreClient, open_client, open_encoders
from sgl_kvfetch.dataplane.launch import DataPlaneProcess, DataPlaneThread, Launch, Line, Running
from sgl_kvfetch.dataplane.messages import Start
from sgl_kvfetch.dataplane.plane import DataPlane
from sgl_kvfetch.dataplane.run import run
from sgl_kvfetch.fetch.rounds import Destination
from sgl_kvfetch.fetch.sink import FramePool, PagePool
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.quant import Quantiser

_launch: Launch = DataPlaneProcess


def open_plane(
    config: KVFetchConfig,
    quantiser: Quantiser,
    heads: HeadSlice,
    rank: int,
    pool: PagePool,
    nvdec: Nvdec | None,
    most_span_pages: int | None = None,
) -> DataPlane:
    """Start the data plane of one rank, whose pages go into ``pool``, and wait until it serves. Call on the scheduler's
    thread, whose GPU is the rank's. Raises KVFetchError.

    The data plane is a process. If it uses the GPU's video engines or restore kernels, it still runs on threads of this
    process, because these need its memory.
    """
    start = Start(
        config.model_dump(mode="json", exclude_unset=True),
        heads.namespace,
        heads.heads.start,
        heads.heads.stop,
        rank,
        most_span_pages,
    )
    encoders = open_encoders(config)
    if nvdec is None and not encoders and not isinstance(pool, FramePool):
        return DataPlane(start, heads.geometry, _launch)
    on_thread = _OnThread(quantiser, nvdec, encoders)
    on_thread.plane = DataPlane(start, heads.geometry, on_thread)
    return on_thread.plane


class _OnThread:
    """Launches a data plane that writes into the engine's pool itself."""

    def __init__(self, quantiser: Quantiser, nvdec: Nvdec | None, encoders: Mapping[str, FrameEncoder]) -> None:
        self._quantiser = quantiser
        self._nvdec = nvdec
        self._encoders = encoders
        self.plane: DataPlane | None = None

    def __call__(self, line: Line) -> Running:
        return DataPlaneThread(run(line, self._open, destinations=self))

    def destination(self, work: int, round_index: int, num_pages: int) -> Destination | None:
        assert self.plane is not None
        return self.plane.given(work, round_index)

    def _open(self, config: KVFetchConfig, heads: HeadSlice, start: Start) -> StoreClient:
        return open_client(
            config,
            heads,
            self._quantiser,
            nvdec=self._nvdec,
            encoders=self._encoders,
            max_span_pages=start.most_span_pages,
        )
