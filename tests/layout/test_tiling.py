"""A tiling gives a layout for every span length and every resolution."""

from __future__ import annotations

import msgspec
import pytest
import torch

from sgl_kvfetch.layout.choose import RESOLUTIONS, channel_layout, default_layout
from sgl_kvfetch.layout.frames import MIN_PICTURE, PICTURE_MULTIPLE, FrameLayout, InterFrame
from sgl_kvfetch.layout.tiling import Tiling, layout_of

BLOCKS = [(1, 1), (8, 8), (32, 16), (1, 32), (5, 7)]
SPANS = [1, 2, 16, 63, 64, 100, 1000, 1024, 8192]
ORDERS: list[InterFrame] = ["sliced", "sequential"]


def tiling_of(layout: FrameLayout) -> Tiling:
    """The tiling that a layout is one size of."""
    fields = msgspec.structs.asdict(layout)
    return Tiling(**{key: value for key, value in fields.items() if key not in ("width", "height")})


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("span_tokens", SPANS)
def test_pictures_fit_the_resolution_and_are_filled(span_tokens: int, resolution: str) -> None:
    width, height = RESOLUTIONS[resolution]
    for (token_rows, token_cols), order in ((block, order) for block in BLOCKS for order in ORDERS):
        tiling = Tiling(
            head_rows=2,
            head_cols=1,
            dim_rows=4,
            dim_cols=16,
            token_rows=token_rows,
            token_cols=token_cols,
            inter_frame=order,
        )
        layout = layout_of(tiling, span_tokens, resolution)
        layout.require_fits(2, 64)
        assert layout.width <= width
        assert layout.height <= height
        assert min(layout.width, layout.height) >= MIN_PICTURE
        assert layout.width % PICTURE_MULTIPLE == layout.height % PICTURE_MULTIPLE == 0
        assert layout.inter_frame == order
        pixels = layout.num_frames(span_tokens) * layout.width * layout.height
        # A frame's last row of tiles and the last frame may be all but empty, and a small picture is padded.
        padding = MIN_PICTURE * max(MIN_PICTURE, layout.tile_width) + width * layout.tile_height
        assert pixels <= 2 * (span_tokens * 128 + padding)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("order", ORDERS)
def test_values_survive(block: tuple[int, int], order: InterFrame) -> None:
    tiling = Tiling(
        head_rows=3,
        head_cols=1,
        dim_rows=2,
        dim_cols=9,
        token_rows=block[0],
        token_cols=block[1],
        inter_frame=order,
        frame_tokens=200,
    )
    integers = torch.randint(0, 256, (700, 2, 3, 17), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    for span_tokens in (1, 63, 700):
        layout = layout_of(tiling, span_tokens)
        span = integers[:span_tokens]
        assert torch.equal(layout.from_frames(layout.to_frames(span), span_tokens, 2, 3, 17), span)


def test_a_block_shrinks_to_what_a_span_fills() -> None:
    tiling = Tiling(head_rows=1, head_cols=2, dim_rows=7, dim_cols=10, token_rows=32, token_cols=16)

    def block(span_tokens: int) -> tuple[int, int]:
        layout = layout_of(tiling, span_tokens)
        return layout.token_rows, layout.token_cols

    assert block(1024) == block(512) == (32, 16)
    assert block(257) == (32, 16)
    assert block(256) == (32, 8)
    assert block(64) == (32, 2)
    assert block(16) == (16, 1)
    assert block(1) == (1, 1)


def test_a_block_shrinks_to_what_a_picture_holds() -> None:
    tiling = Tiling(head_rows=2, head_cols=1, dim_rows=8, dim_cols=8, token_rows=32, token_cols=64)
    small, large = layout_of(tiling, 8192, "240p"), layout_of(tiling, 8192, "1080p")
    assert (small.token_rows, small.token_cols) == (8, 32)
    assert (large.token_rows, large.token_cols) == (32, 64)


def test_a_tile_larger_than_the_resolution_grows_the_picture() -> None:
    layout = layout_of(Tiling(head_rows=1, head_cols=32, dim_rows=1, dim_cols=128, token_rows=8), 100)
    assert layout.width == 32 * 128
    assert layout.num_frames(100) == 1


def test_frame_tokens_make_more_frames() -> None:
    tiling = Tiling(head_rows=2, head_cols=1, dim_rows=8, dim_cols=8, inter_frame="sequential")
    assert layout_of(tiling, 1024).num_frames(1024) == 2
    shorter = msgspec.structs.replace(tiling, frame_tokens=256)
    assert layout_of(shorter, 1024).num_frames(1024) == 4
    assert 256 <= layout_of(shorter, 1024).tokens_per_frame < 256 + 9  # 9 rows of tiles, 16 high each
    blocks = msgspec.structs.replace(tiling, frame_tokens=64, token_rows=16, token_cols=16)
    assert (layout_of(blocks, 1024).token_rows, layout_of(blocks, 1024).token_cols) == (8, 8)


@pytest.mark.parametrize("span_tokens", SPANS)
def test_the_default_layouts_tilings_give_nothing_larger(span_tokens: int) -> None:
    for num_heads, head_dim in ((2, 64), (8, 128), (5, 112)):
        for resolution in RESOLUTIONS:
            for choose in (default_layout, channel_layout):
                layout = choose(num_heads, head_dim, span_tokens, resolution)
                again = layout_of(tiling_of(layout), span_tokens, resolution)
                assert (again.token_rows, again.token_cols) == (layout.token_rows, layout.token_cols)
                assert again.num_frames(span_tokens) <= layout.num_frames(span_tokens)
                assert again.width * again.height <= layout.width * layout.height
                if span_tokens == 8192:
                    assert again == layout


def test_a_tiling_is_small_json() -> None:
    tiling = Tiling(head_rows=1, head_cols=2, dim_rows=7, dim_cols=10)
    encoded = msgspec.json.encode(tiling)
    assert encoded == b'{"head_rows":1,"head_cols":2,"dim_rows":7,"dim_cols":10}'
    assert msgspec.json.decode(encoded, type=Tiling) == tiling
    assert str(tiling) == "heads 1x2, dims 7x10, sliced"
    larger = msgspec.structs.replace(tiling, token_rows=4, frame_tokens=64, inter_frame="sequential")
    assert str(larger) == "heads 1x2, dims 7x10, tokens 4x1, sequential, 64 a frame"
    with pytest.raises(msgspec.ValidationError, match="dim_rows"):
        msgspec.json.decode(encoded.replace(b"7", b"0"), type=Tiling)
