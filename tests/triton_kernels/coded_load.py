"""A coded prompt that is loaded into a pool on the CPU: what is launched is what `GpuLoader` launches.

For a process of its own: the pool's class is a stand-in, since SGLang takes seconds to import and need not run with
every Triton.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from harness import stand_in_pool

stand_in_pool.install()

from harness.coded_prompts import stage_coded  # noqa: E402
from harness.immediate_device import ImmediateDevice, ImmediateStream  # noqa: E402
from sgl_kvfetch.codec.bitstream.registry import resolution_for  # noqa: E402
from sgl_kvfetch.codec.container.reader import cell_place  # noqa: E402
from sgl_kvfetch.codec.container.segment import CodedSegment  # noqa: E402
from sgl_kvfetch.codec.quant.base import Quantiser  # noqa: E402
from sgl_kvfetch.plugin.device.gpu_loads import CodedLoad  # noqa: E402
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages, PinnedMemory  # noqa: E402
from sgl_kvfetch.types import KVGeometry  # noqa: E402
from tests.segments import make_segment  # noqa: E402


class CodedPrompt:
    """Segments of one span each in `ans`, one after another."""

    def __init__(self, quantiser: Quantiser, geometry: KVGeometry, segment_pages: Sequence[int]) -> None:
        segments: list[CodedSegment] = []
        first_page = 0
        for num_pages in segment_pages:
            segment, _ = make_segment(
                geometry,
                num_pages,
                quantiser=quantiser,
                codec="ans",
                resolution=resolution_for("ans", "240p"),
                first_page=first_page,
                span_pages=num_pages,
            )
            segments.append(segment)
            first_page += num_pages
        self._staged = stage_coded(segments, quantiser)
        pool = stand_in_pool.make_pool(geometry, 2 * first_page * geometry.page_size)
        self._pages = CudaPages(pool, geometry.page_size, ImmediateDevice(), ImmediateStream())
        manifest = segments[0].manifest
        self._pages.prepare(quantiser, [cell_place(manifest, cell) for cell in manifest.span_cells(0)])

    def load(self, slots: torch.Tensor, first_page: int, scratch_bytes: int) -> None:
        """Load the pages from ``first_page`` on."""
        device = self._pages.device
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8)
        staged = self._staged.of_pages(range(first_page, self._staged.num_pages), self._pages.geometry.page_size)
        assert staged.code is not None
        memory = PinnedMemory(device, staged.memory)
        coded = CodedLoad(self._pages, device, device.new_stream(), scratch_bytes, staged.code, memory, slots)
        for work in coded.begin():
            work()
        for layer in range(self._pages.geometry.num_layers):
            for part in coded.parts(layer):
                works = part(scratch)
                for work in itertools.chain(works.copies, works.decodes, works.restores, works.checks):
                    work()
        coded.fetch_results()
