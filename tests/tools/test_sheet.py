"""The contact sheet of a span: no more is decoded than it shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.tools.pictures import MAX_SHEET_ROWS, draw_sheet
from tests.segments import SMALL, make_segment
from tests.tools.conftest import kvfetch, put


async def test_a_sheet_costs_the_cells_that_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment, _ = make_segment(replace(SMALL, num_layers=90), 2)
    manifest = segment.manifest
    assert manifest.cells_per_span > MAX_SHEET_ROWS
    put(tmp_path / "store", segment)
    read: list[int] = []
    get = LocalStore.get

    async def counting(store: LocalStore, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        read.append(start)
        return await get(store, name, start, length)

    monkeypatch.setattr(LocalStore, "get", counting)
    store = LocalStore(tmp_path / "store")
    assert (await draw_sheet(store, manifest, 0)).startswith(b"\x89PNG")
    assert len(set(read)) == MAX_SHEET_ROWS
    with pytest.raises(ConfigError, match="counted from 0"):
        await draw_sheet(store, manifest, manifest.num_spans)
    await store.close()
    monkeypatch.undo()


def test_a_sheet_has_a_row_a_cell_and_a_column_a_part(tmp_path: Path) -> None:
    segment, _ = make_segment(num_pages=4)
    put(tmp_path / "store", segment)
    drawn = kvfetch("inspect", str(tmp_path / "store"), "--png", str(tmp_path / "sheet.png"), "--span", "1")
    assert drawn.exit_code == 0, drawn.output
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    layout = segment.manifest.variants[0].layouts["k"]
    assert sheet.shape[0] > 2 * layout.height  # two layer groups
    assert sheet.shape[1] > 4 * layout.width  # K and V, two byte planes each
    assert (sheet == 255).any()  # the labels, at least
