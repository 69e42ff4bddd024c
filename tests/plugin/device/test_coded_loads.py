"""How a load is cut into parts. `test_gpu_loads` has loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.device.gpu_loads import ALIGNMENT, _Needs, _Part, _parts, _runs
from sgl_kvfetch.protocol.arena import CELL, CHUNK, StagedCode

CODE_BYTES, ROOM, FRAMES_BYTES, TABLES_BYTES = 100, 112, 1024, 512  # of a chunk
PART_BYTES = 4 * FRAMES_BYTES + 2 * ALIGNMENT


def parts_of(kinds: Sequence[Sequence[int]], scratch_bytes: int, num_chunks: int = 1) -> list[_Part]:
    """Return the parts of cells of which each has so many chunks that the GPU decodes, by layer group. With several,
    they have distributions of their own."""
    num_coded = np.concatenate(kinds)
    layers = np.repeat(3 * np.arange(len(kinds)), [len(each) for each in kinds])
    code = np.full(len(layers), num_chunks * ROOM)
    tables = num_coded * TABLES_BYTES * (num_chunks > 1)
    parts = list(_parts(layers, _Needs(code, num_coded * FRAMES_BYTES, tables, num_coded), scratch_bytes))
    taken = np.concatenate([np.arange(part.cells.start, part.cells.stop) for part in parts])
    assert taken.tolist() == list(range(len(layers)))
    for part in parts:
        assert part.layer == layers[part.cells][0]
        assert part.frames_bytes == FRAMES_BYTES * num_coded[part.cells].sum()
        assert code[part.cells].sum() <= part.frames_at
        assert not part.frames_at % ALIGNMENT
        assert part.frames_at + part.frames_bytes + tables[part.cells].sum() <= scratch_bytes
        assert part.status.start % 4 == 0
        assert part.status.stop - part.status.start == part.coded.stop - part.coded.start == num_coded[part.cells].sum()
    assert all(x.status.stop <= y.status.start for x, y in pairwise(parts))
    assert all(x.coded.stop == y.coded.start for x, y in pairwise(parts))
    return parts


OF_TWO = 2 * (4 * ROOM + 2 * (FRAMES_BYTES + TABLES_BYTES)) + ALIGNMENT  # cells of four chunks, two of them coded


@pytest.mark.parametrize(
    ("kinds", "scratch_bytes", "num_chunks", "expected"),
    [
        ([[1] * 2] * 11, 1 << 20, 1, [2, 4, 8, 8]),  # a short prompt has few parts, and the first is one layer group
        ([[1] * 2] * 5, PART_BYTES, 1, [2, 4, 4]),  # whole layer groups, as many as fit
        ([[1] * 3] * 3, PART_BYTES, 1, [3, 3, 3]),
        ([[1] * 9] * 2, PART_BYTES, 1, [4, 4, 1, 4, 4, 1]),  # one that does not fit is cut
        ([[1, 1, 0, 0]] * 2, 1 << 20, 1, [4, 4]),  # cells that are coded and others share parts
        ([[0, 0]] * 3, 1 << 20, 1, [2, 4]),
        ([[2, 2]] * 3, 1 << 20, 4, [2, 4]),  # with room for decoding tables
        ([[2] * 3] * 2, OF_TWO, 4, [2, 1] * 2),
    ],
)
def test_how_cells_are_cut_into_parts(
    kinds: list[list[int]], scratch_bytes: int, num_chunks: int, expected: list[int]
) -> None:
    parts = parts_of(kinds, scratch_bytes, num_chunks)
    assert [part.cells.stop - part.cells.start for part in parts] == expected


def test_a_cell_that_does_not_fit_is_named() -> None:
    with pytest.raises(UnsupportedError, match="1280 bytes of a cell do not fit into 1024 of a part"):
        parts_of([[1]], 1024)
    with pytest.raises(UnsupportedError, match="3328 bytes of a cell do not fit into 3072 of a part"):
        parts_of([[2]], 3072, 2)


def test_cells_that_have_no_page_of_a_load_are_left_out_and_no_table_names_a_page_without_slots() -> None:
    cells = np.zeros(6, dtype=CELL)  # two layer groups of three spans
    cells["first_layer"], cells["table"], cells["num_pages"] = [0, 0, 0, 3, 3, 3], [0, 4, 8] * 2, 4
    tables = np.array([0, 1, 2, 3, 4, -1, 6, 5, 7, 8, 9, -1], dtype=np.int32)
    chunks = np.zeros((6, 2), dtype=CHUNK)
    chunks["start"] = np.arange(12).reshape(6, 2)
    code = StagedCode(cells, chunks, tables, torch.empty(0, dtype=torch.uint8))
    cut = code.of_pages(range(4, 8))
    assert cut.chunks["start"].tolist() == [[2, 3], [4, 5], [8, 9], [10, 11]]
    assert cut.cells["table"].tolist() == [4, 8] * 2
    assert cut.page_tables.tolist() == [-1, -1, -1, -1, 0, -1, 2, 1, 3, -1, -1, -1]
    assert cut.page_tables.dtype == np.int32
    again = cut.of_pages(range(1, 3))
    assert again.cells["table"].tolist() == [4, 4]
    assert [page for page in again.page_tables if page >= 0] == [1, 0]
    assert not len(cut.of_pages(range(0)).cells)
    assert tables[0] == 0  # which other requests share


def test_chunks_that_lie_together_are_copied_together() -> None:
    chunks = np.zeros(6, dtype=CHUNK)
    chunks["start"] = [1024, 1136, 64, 176, 1248, 288]  # two layer groups of two spans, and a third group
    chunks["size"] = CODE_BYTES
    (begins, sizes, places), code_start = _runs(chunks)
    assert begins.tolist() == [64, 1024]
    assert sizes.tolist() == [324, 324]
    assert places.tolist() == [0, 336]
    assert code_start.tolist() == [336, 448, 0, 112, 560, 224]
