import msgspec
import pytest
import torch

from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.layout.choose import RESOLUTIONS, channel_layout, default_layout
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


BLOCKS = FrameLayout(
    width=152, height=160, head_rows=2, head_cols=2, dim_rows=3, dim_cols=4, token_rows=5, token_cols=3
)  # six columns and five rows of tiles of 15 tokens: 450 a frame


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_tokens", [1, 7, 449, 450, 451, 1000])
def test_blocks_of_tokens_and_back(num_tokens: int, order: InterFrame) -> None:
    layout = msgspec.structs.replace(BLOCKS, inter_frame=order)
    assert layout.tokens_per_frame == 450
    integers = random_integers(num_tokens, 2, 3, 11)
    frames = layout.to_frames(integers)
    assert torch.equal(layout.from_frames(frames, num_tokens, 2, 3, 11), integers)
    assert frames.to(torch.int64).sum() - integers.to(torch.int64).sum() == FILL * (frames.numel() - integers.numel())


@pytest.mark.parametrize("order", ORDERS)
def test_each_value_of_a_block_lies_where_the_format_says(order: InterFrame) -> None:
    layout = msgspec.structs.replace(BLOCKS, inter_frame=order)
    num_tokens = 1000
    integers = random_integers(num_tokens, 2, 3, 11)
    frames = layout.to_frames(integers)
    num_frames = layout.num_frames(num_tokens)
    assert num_frames == 3
    for token in (0, 1, 2, 3, 44, 45, 46, 449, 450, 998, 999):
        for layer, head, dim in ((0, 0, 0), (1, 2, 10), (1, 1, 6)):
            place, frame = divmod(token, num_frames)
            if order == "sequential":
                frame, place = divmod(token, 450)
            tile, within = divmod(place, 15)
            y = ((tile // 6 * 2 + head // 2) * 3 + dim // 4) * 5 + within // 3
            x = ((tile % 6 * 2 + head % 2) * 4 + dim % 4) * 3 + within % 3
            assert frames[frame, layer, y, x] == integers[token, layer, head, dim]


def test_what_is_stored_does_not_change_without_blocks() -> None:
    layout = FrameLayout(width=144, height=160, head_rows=2, head_cols=2, dim_rows=6, dim_cols=8)
    stored = {"width": 144, "height": 160, "head_rows": 2, "head_cols": 2, "dim_rows": 6, "dim_cols": 8}
    assert msgspec.json.encode(layout) == msgspec.json.encode(stored | {"inter_frame": "sliced"})
    assert msgspec.json.decode(msgspec.json.encode(BLOCKS), type=FrameLayout) == BLOCKS


@pytest.mark.parametrize("tokens", [{"token_rows": 0}, {"token_cols": 0}, {"token_rows": 1 << 17}, {"token_cols": -1}])
def test_blocks_out_of_bounds_are_refused(tokens: dict[str, int]) -> None:
    stored = msgspec.to_builtins(BLOCKS) | tokens
    with pytest.raises(msgspec.ValidationError, match=next(iter(tokens))):
        msgspec.convert(stored, FrameLayout)


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(FormatError, match="tile of 160x30 exceeds its picture of 152x160"):
        msgspec.structs.replace(BLOCKS, token_cols=20).require_fits(3, 11)
    with pytest.raises(FormatError, match="tile of 24x204 exceeds its picture of 152x160"):
        msgspec.structs.replace(BLOCKS, token_rows=34).require_fits(3, 11)


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


SPANS = [1, 16, 64, 100, 256, 1000, 1024, 2048, 8192]


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("head_dim", [64, 67, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("num_heads", [1, 2, 3, 8, 32])
def test_channel_pictures_suit_every_decoder_and_waste_little(num_heads: int, head_dim: int, resolution: str) -> None:
    for span_tokens in SPANS:
        layout = channel_layout(num_heads, head_dim, span_tokens, resolution)
        layout.require_fits(num_heads, head_dim)
        for side, nominal in zip((layout.width, layout.height), RESOLUTIONS[resolution], strict=True):
            assert MIN_PICTURE <= side <= nominal
            assert side % PICTURE_MULTIPLE == 0
        values = span_tokens * num_heads * head_dim
        pixels = layout.num_frames(span_tokens) * layout.width * layout.height
        assert pixels <= 1.25 * max(values, MIN_PICTURE**2), (span_tokens, layout)
        assert layout.inter_frame == "sequential"  # consecutive tokens in a frame


@pytest.mark.parametrize("num_heads", [300, 2048])
def test_channel_pictures_grow_where_not_even_one_token_fits(num_heads: int) -> None:
    layout = channel_layout(num_heads, 128, 64)
    layout.require_fits(num_heads, 128)
    assert layout.height == num_heads + -num_heads % PICTURE_MULTIPLE
    assert layout.width <= RESOLUTIONS["240p"][0]


@pytest.mark.parametrize("span_tokens", [64, 256, 1024, 4096])
def test_channel_blocks_are_whole_coding_units_high_where_there_is_room(span_tokens: int) -> None:
    """Bits follow from that more than from how square a block is."""
    for num_heads, head_dim in ((1, 64), (2, 64), (1, 128), (2, 128), (8, 128)):
        layout = channel_layout(num_heads, head_dim, span_tokens, "1080p")
        assert layout.token_rows % 32 == 0, layout


def test_a_channel_lies_in_one_rectangle_beside_the_next() -> None:
    layout = channel_layout(2, 64, 1024, "1080p")
    assert layout.num_frames(1024) == 1
    integers = torch.zeros((1024, 1, 2, 64), dtype=torch.uint8)
    integers[:, 0, 1, 5] = 255
    integers[:, 0, 1, 6] = 254
    frame = layout.to_frames(integers)[0, 0]
    ys, xs = (frame == 255).nonzero().unbind(1)
    assert (int(ys.max() - ys.min()) + 1, int(xs.max() - xs.min()) + 1) == (layout.token_rows, layout.token_cols)
    assert layout.token_rows * layout.token_cols == 1024
    next_ys, next_xs = (frame == 254).nonzero().unbind(1)
    assert (int(next_ys.min()), int(next_xs.min())) == (int(ys.min()), int(xs.min()) + layout.token_cols)
