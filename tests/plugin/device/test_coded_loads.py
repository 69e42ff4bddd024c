"""How a load is cut into parts. `test_gpu_loads` has loads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.device.gpu_loads import ALIGNMENT, _Part, _parts, _runs
from sgl_kvfetch.protocol.arena import CELL, StagedCode

CODE_BYTES, FRAMES_BYTES = 100, 1024  # of a cell
PART_BYTES = 4 * FRAMES_BYTES + 2 * ALIGNMENT


def parts_of(kinds: Sequence[Sequence[int]], scratch_bytes: int) -> list[_Part]:
    """Return the parts of cells of which each is coded (1) or not, by layer group."""
    cells = np.zeros(sum(map(len, kinds)), dtype=CELL)
    cells["first_layer"] = np.repeat(3 * np.arange(len(kinds)), [len(each) for each in kinds])
    cells["is_coded"] = np.concatenate(kinds)
    cells["start"], cells["size"] = 64 + 112 * np.arange(len(cells)), CODE_BYTES
    parts = list(_parts(cells, np.where(cells["is_coded"], FRAMES_BYTES, 0), scratch_bytes))
    taken = np.concatenate([np.arange(part.cells.start, part.cells.stop) for part in parts])
    assert taken.tolist() == list(range(len(cells)))
    for part in parts:
        some = cells[part.cells]
        assert part.layer == some["first_layer"][0]
        assert set(some["is_coded"]) == {int(part.is_coded)}
        ((begin,), (size,), (place,)), code_start = _runs(some)
        assert (begin, begin + size) == (some["start"][0], some["start"][-1] + CODE_BYTES)
        assert place == 0
        assert code_start.tolist() == (some["start"] - begin).tolist()
        assert part.frames_bytes == FRAMES_BYTES * some["is_coded"].sum()
        assert size <= part.frames_at
        assert part.frames_at + part.frames_bytes <= scratch_bytes
        assert part.status.start % 4 == 0
        assert part.status.stop - part.status.start == len(some)
    assert all(x.status.stop <= y.status.start for x, y in pairwise(parts))
    return parts


def num_cells(parts: Sequence[_Part]) -> list[int]:
    return [part.cells.stop - part.cells.start for part in parts]


def test_a_short_prompt_has_few_parts_and_the_first_is_one_layer_group() -> None:
    assert num_cells(parts_of([[1] * 2] * 11, 1 << 20)) == [2, 4, 8, 8]


def test_parts_are_whole_layer_groups_as_many_as_fit() -> None:
    assert num_cells(parts_of([[1] * 2] * 5, PART_BYTES)) == [2, 4, 4]
    assert num_cells(parts_of([[1] * 3] * 3, PART_BYTES)) == [3, 3, 3]


def test_a_layer_group_that_does_not_fit_is_cut() -> None:
    assert num_cells(parts_of([[1] * 9] * 2, PART_BYTES)) == [4, 4, 1, 4, 4, 1]


def test_cells_that_are_coded_and_others_are_parts_of_their_own() -> None:
    assert num_cells(parts_of([[1, 1, 0, 0]] * 2, 1 << 20)) == [2, 2, 2, 2]
    assert num_cells(parts_of([[0, 0]] * 3, 1 << 20)) == [2, 4]


def test_a_cell_that_does_not_fit_is_named() -> None:
    with pytest.raises(UnsupportedError, match="1280 bytes of a cell do not fit into 1024 of a part"):
        parts_of([[1]], 1024)


def test_cells_that_have_no_page_of_a_load_are_left_out_and_no_table_names_a_page_without_slots() -> None:
    cells = np.zeros(6, dtype=CELL)  # two layer groups of three spans
    cells["first_layer"], cells["table"], cells["num_pages"] = [0, 0, 0, 3, 3, 3], [0, 4, 8] * 2, 4
    tables = np.array([0, 1, 2, 3, 4, -1, 6, 5, 7, 8, 9, -1], dtype=np.int32)
    code = StagedCode(cells, tables, torch.empty(0, dtype=torch.uint8))
    cut = code.of_pages(range(4, 8))
    assert cut.cells["table"].tolist() == [4, 8] * 2
    assert cut.page_tables.tolist() == [-1, -1, -1, -1, 0, -1, 2, 1, 3, -1, -1, -1]
    assert cut.page_tables.dtype == np.int32
    again = cut.of_pages(range(1, 3))
    assert again.cells["table"].tolist() == [4, 4]
    assert [page for page in again.page_tables if page >= 0] == [1, 0]
    assert not len(cut.of_pages(range(0)).cells)
    assert tables[0] == 0  # which other requests share


def test_cells_that_lie_together_are_copied_together() -> None:
    cells = np.zeros(6, dtype=CELL)
    cells["start"] = [1024, 1136, 64, 176, 1248, 288]  # two layer groups of two spans, and a third group
    cells["size"] = CODE_BYTES
    (begins, sizes, places), code_start = _runs(cells)
    assert begins.tolist() == [64, 1024]
    assert sizes.tolist() == [324, 324]
    assert places.tolist() == [0, 336]
    assert code_start.tolist() == [336, 448, 0, 112, 560, 224]
