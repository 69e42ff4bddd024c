"""Stages prompts without a data plane, still coded, as the loader for GPUs takes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.plane.coded import CodedRegion, RegionPlan, gpu_restores
from sgl_kvfetch.plane.fetch.plan import PageSource, ReadUnit, span_parts
from sgl_kvfetch.plane.memory_cache import Held, MemoryCache
from sgl_kvfetch.protocol.arena import Arena, StagedCode, StagedValues


def stage_coded(segments: Sequence[CodedSegment], quantiser: Quantiser) -> StagedValues:
    """Return all pages of consecutive segments, in shared memory, as `Stager` leaves them there."""
    data = {segment.data_name: segment.data for segment in segments}
    readers = [SegmentReader(segment.manifest, quantiser) for segment in segments]
    sources = [PageSource(reader, page) for reader in readers for page in range(len(reader.manifest.page_hashes))]
    assert gpu_restores(sources)
    plan = RegionPlan(span_parts(sources), Held(MemoryCache()))
    arena = Arena.create(plan.num_bytes)
    region = CodedRegion(arena, 0, plan)
    for part in plan.parts:
        content = data[part.reader.data_name]
        for cell in part.reader.span_cells(part.span):
            chunks = part.reader.chunks_in(cell, [content])
            region.decode(part, ReadUnit(part.reader, (cell,)), [chunks], {})()
    num_cells, tables = region.tables(len(sources))
    memory = torch.cat([arena.whole, torch.frombuffer(bytearray(tables), dtype=torch.uint8)])
    code = StagedCode.of(memory[arena.num_bytes :], num_cells)
    return StagedValues(len(sources), len(sources), memory, code=code)
