import pytest
import torch

from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.layout.choose import RESOLUTIONS, default_layout
from sgl_kvfetch.layout.frames import FILL, MIN_PICTURE, PICTURE_MULTIPLE, FrameLayout, InterFrame

GEOMETRIES = [(1, 48), (2, 64), (3, 80), (7, 96), (8, 128), (5, 112), (128, 256), (128, 48), (1, 576)]
ORDERS: list[InterFrame] = ["sliced", "sequential"]


def random_integers(num_tokens: int, num_layers: int, num_heads: int, head_dim: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(0, 256, (num_tokens, num_layers, num_heads, head_dim), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(("num_heads", "head_dim"), GEOMETRIES)
def test_frames_and_back(num_heads: int, head_dim: int, num_layers: int, order: InterFrame) -> None:
    for num_tokens in (1, 16, 63):
        layout = default_layout(num_heads, head_dim, 64, inter_frame=order)
        integers = random_integers(num_tokens, num_layers, num_heads, head_dim)
        frames = layout.to_frames(integers)
        assert frames.shape == (layout.num_frames(num_tokens), 3, layout.height, layout.width)
        assert torch.equal(layout.from_frames(frames, num_tokens, num_layers, num_heads, head_dim), integers)


@pytest.mark.parametrize("order", ORDERS)
def test_each_value_lies_where_the_format_says(order: InterFrame) -> None:
    layout = FrameLayout(width=144, height=160, head_rows=2, head_cols=2, dim_rows=6, dim_cols=8, inter_frame=order)
    num_tokens = 1000
    integers = random_integers(num_tokens, 2, 3, 48)
    frames = layout.to_frames(integers)
    num_frames = layout.num_frames(num_tokens)
    assert num_frames > 1
    for token in (0, 1, 17, 998, 999):
        for layer, head, dim in ((0, 0, 0), (1, 2, 47), (1, 1, 13)):
            tile, frame = divmod(token, num_frames)
            if order == "sequential":
                frame, tile = divmod(token, layout.tokens_per_frame)
            y = tile // layout.tile_cols * 12 + head // 2 * 6 + dim // 8
            x = tile % layout.tile_cols * 16 + head % 2 * 8 + dim % 8
            assert frames[frame, layer, y, x] == integers[token, layer, head, dim]


def test_neighbouring_tokens_lie_at_the_same_place_in_consecutive_frames() -> None:
    layout = default_layout(8, 128, 1000)
    integers = torch.zeros((1000, 1, 8, 128), dtype=torch.uint8)
    integers[4:6] = 255
    lit = layout.to_frames(integers)[:, 0] == 255
    assert torch.equal(lit[4], lit[5])
    assert lit.sum() == 2 * 1024


def test_what_holds_nothing_is_constant() -> None:
    layout = default_layout(3, 80, 16)
    frames = layout.to_frames(torch.zeros((16, 1, 3, 80), dtype=torch.uint8))
    assert (frames[:, 1:] == FILL).all()
    assert (frames[:, 0] == 0).sum() == 16 * 3 * 80


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize(("num_heads", "head_dim"), GEOMETRIES)
@pytest.mark.parametrize("span_tokens", [1, 64, 1024])
def test_default_pictures_suit_every_decoder(num_heads: int, head_dim: int, span_tokens: int, resolution: str) -> None:
    layout = default_layout(num_heads, head_dim, span_tokens, resolution)
    layout.require_fits(num_heads, head_dim)
    for side in (layout.width, layout.height):
        assert side >= MIN_PICTURE
        assert side % PICTURE_MULTIPLE == 0
    nominal = RESOLUTIONS[resolution]
    if layout.tokens_per_frame > 1:
        assert layout.width <= max(nominal[0], MIN_PICTURE)
        assert layout.height <= max(nominal[1], MIN_PICTURE)


def test_heads_that_do_not_fit_are_refused() -> None:
    layout = default_layout(2, 64, 64)
    with pytest.raises(FormatError, match="cannot hold 3 heads of 64"):
        layout.require_fits(3, 64)
