"""Looks a prefix up and reads its bytes as a fetch does, and neither decodes nor restores them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.protect import open_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane.fetch.plan import READS_A_SPAN, ReadUnit, read_units
from sgl_kvfetch.stores.base import Store


async def find_units(
    store: Store,
    heads: HeadSlice,
    page_hashes: Sequence[bytes],
    quantiser: Quantiser,
    read_bytes: int,
    reads_a_span: int = READS_A_SPAN,
) -> list[ReadUnit]:
    """Look pages up. Return the reads that fetch what is stored of them."""
    units: list[ReadUnit] = []
    for hit in (await store.lookup(heads.folder, page_hashes)).hits:
        reader = SegmentReader(open_manifest(decode_manifest(hit.manifest), store.encryption_keys), quantiser)
        units += [
            unit
            for span in range(reader.manifest.num_spans)
            for unit in read_units(reader, span, read_bytes, reads_a_span)
        ]
    return units


async def read_all(store: Store, units: Sequence[ReadUnit]) -> int:
    """Read all at once, as far as the client has connections. Return the number of bytes."""
    return sum(await asyncio.gather(*(_size(store, unit) for unit in units)))


async def _size(store: Store, unit: ReadUnit) -> int:
    size = 0
    for name, start, end in unit.reads:
        if not await store.read(name, start, [np.empty(end - start, dtype=np.uint8).data]):
            raise SystemExit(f"{name} is not in the store")
        size += end - start
    return size
