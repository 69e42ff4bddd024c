"""The search looks at sound layouts only, and what it names the smallest is."""

from __future__ import annotations

import zlib
from collections import Counter
from math import prod

import pytest
import torch
from msgspec.structs import replace

from sgl_kvfetch.layout import search
from sgl_kvfetch.layout.choose import RESOLUTIONS, channel_layout, default_layout
from sgl_kvfetch.layout.frames import FrameLayout
from sgl_kvfetch.layout.search import Found, Search, blocks, dim_tilings, factorisations, references, spreads, tilings
from sgl_kvfetch.layout.tiling import layout_of

SHAPES = [(2, 64, 256, "240p"), (8, 128, 1024, "240p"), (3, 80, 64, "480p"), (1, 576, 100, "240p")]


def smooth_cells(count: int = 2, num_tokens: int = 128, num_heads: int = 2, head_dim: int = 16) -> list[torch.Tensor]:
    """Channels of different spread that vary slowly from token to token."""
    generator = torch.Generator().manual_seed(2)
    steps = torch.randn(count, num_tokens, 3, num_heads, head_dim, generator=generator)
    spread = torch.linspace(0.2, 3, head_dim).flip(0)
    return list((steps.cumsum(1) * spread + 128).clamp(0, 255).round().to(torch.uint8))


def deflate(frames: torch.Tensor) -> bytes:
    return zlib.compress(frames.numpy().tobytes(), 6)


def found_of(found: Found) -> list[search.Measured]:
    return [*found.finalists, *found.others]


def test_factorisations() -> None:
    assert factorisations(12) == [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]
    assert factorisations(1) == [(1, 1)]


@pytest.mark.parametrize("head_dim", [1, 16, 64, 80, 128, 576])
def test_dim_tilings_hold_a_head_and_waste_no_row(head_dim: int) -> None:
    found = dim_tilings(head_dim)
    assert set(factorisations(head_dim)) <= set(found)
    assert all(rows * cols >= head_dim > (rows - 1) * cols and rows * (cols - 1) < head_dim for rows, cols in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("shape", SHAPES)
def test_candidates_are_bijections_within_the_resolution(shape: tuple[int, int, int, str]) -> None:
    num_heads, head_dim, span_tokens, resolution = shape
    width, height = RESOLUTIONS[resolution]
    first = tilings(*shape)
    assert {(t.head_rows, t.head_cols) for t in first} <= set(factorisations(num_heads))
    second = [t for tiling in first[::5] for t in blocks(tiling, span_tokens, resolution)]
    third = [t for tiling in second[::9] for t in spreads(tiling, span_tokens, resolution)]
    assert {t.inter_frame for t in third} == {"sliced", "sequential"}
    assert any(t.frame_tokens for t in third) or span_tokens == 64  # which the smallest picture holds
    integers = torch.randint(0, 256, (span_tokens, 1, num_heads, head_dim), dtype=torch.uint8)
    for tiling in (*first[::7], *second[::11], *third[::5], *references(*shape).values()):
        layout = layout_of(tiling, span_tokens, resolution)
        assert layout.width <= -(-width // 8) * 8
        assert layout.height <= -(-height // 8) * 8
        back = layout.from_frames(layout.to_frames(integers), span_tokens, 1, num_heads, head_dim)
        assert torch.equal(back, integers)


def test_references_are_the_default_layouts() -> None:
    shape = (2, 64, 1024, "240p")
    layouts = [layout_of(tiling, 1024, "240p") for tiling in references(*shape).values()]
    assert layouts == [default_layout(*shape), channel_layout(*shape)]


def test_the_winner_is_the_smallest_that_was_measured() -> None:
    cells = smooth_cells()
    found = Search(cells, "240p", deflate, sample=1).run()
    num_values = sum(cell.numel() for cell in cells)
    sizes: dict[FrameLayout, float] = {}
    for m in found_of(found):
        sample = len(deflate(m.layout.to_frames(cells[1])))
        if m.candidate.order == "stored":
            assert m.sample_bits == 8 * sample / cells[1].numel()
        if m.bits is not None and m.candidate.order == "stored":
            sizes[m.layout] = 8 * sum(len(deflate(m.layout.to_frames(cell))) for cell in cells) / num_values
            assert m.bits == sizes[m.layout]
    assert found.winner.bits == min(sizes.values())
    assert found.winner.candidate.order == "stored"
    channel_major = sizes[channel_layout(2, 16, 128)]
    assert found.gain == pytest.approx(1 - min(sizes.values()) / channel_major)
    assert layout_of(found.winner.candidate.tiling, 128, "240p") == found.winner.layout
    # Nothing that was smaller on the sample than all finalists is left behind.
    assert min(m.sample_bits for m in found.others) >= min(m.sample_bits for m in found.finalists)


def test_results_are_sorted_and_each_layout_stands_there_once() -> None:
    found = Search(smooth_cells(), "240p", deflate).run()
    bits = [m.bits for m in found.finalists]
    assert bits == sorted(b for b in bits if b is not None)
    assert [m.sample_bits for m in found.others] == sorted(m.sample_bits for m in found.others)
    assert all(m.bits is None for m in found.others)
    stored = Counter(m.layout for m in found_of(found) if m.candidate.order == "stored")
    assert set(stored.values()) == {1}
    assert {m.name for m in found.finalists if m.name} <= {"near-square", "channel-major"}
    assert any(m.name for m in found.finalists)
    assert any(m.layout.tokens_per_tile == 1 for m in found.finalists)


def test_orders_that_give_the_same_pictures_are_measured_once() -> None:
    found = found_of(Search(smooth_cells(1, num_tokens=64), "1080p", deflate).run())
    single = [m.layout for m in found if m.candidate.order == "stored" and m.layout.num_frames(64) == 1]
    assert len(single) > 20
    assert len({replace(layout, inter_frame="sliced") for layout in single}) == len(single)


def test_the_search_finds_what_it_is_asked_for() -> None:
    """An encoder that likes frames of few tokens in rows of coefficients."""

    def picky(frames: torch.Tensor) -> bytes:
        return bytes(frames.shape[2] * frames.shape[3] // 8)

    found = Search(smooth_cells(), "240p", picky).run()
    layout = found.winner.layout
    assert layout.width * layout.height == min(m.layout.width * m.layout.height for m in found_of(found))


def test_channels_by_variance_can_be_smaller_and_do_not_win() -> None:
    (cell,) = smooth_cells(1)
    shuffled = cell[..., torch.randperm(16, generator=torch.Generator().manual_seed(3))]
    ordered = search._ordered(shuffled, "variance")
    spread = ordered.float().var(0)
    assert (spread.diff(dim=-1) <= 0).all()
    assert torch.equal(ordered.sort(dim=-1).values, cell.sort(dim=-1).values)
    assert search._ordered(cell, "stored") is cell

    def likes_order(frames: torch.Tensor) -> bytes:
        return bytes(100 if torch.equal(frames, likes.to_frames(ordered)) else 200)

    likes = default_layout(2, 16, 128)
    found = Search([shuffled], "240p", likes_order).run()
    assert found.winner.candidate.order == "stored"


def test_threads_find_the_same_and_each_layout_is_reported() -> None:
    cells = smooth_cells()
    calls: list[None] = []
    alone = Search(cells, "240p", deflate, on_measured=lambda: calls.append(None)).run()
    together = Search(cells, "240p", deflate, workers=3).run()
    assert alone == together
    assert len(calls) == len(found_of(alone)) + len(alone.finalists) - 1  # the one by variance is not sampled


def test_an_encoders_error_is_not_swallowed() -> None:
    def broken(frames: torch.Tensor) -> bytes:
        raise RuntimeError(f"cannot encode {prod(frames.shape)} values")

    with pytest.raises(RuntimeError, match="cannot encode"):
        Search(smooth_cells(), "240p", broken, workers=2).run()
