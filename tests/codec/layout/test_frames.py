import pytest
import torch

from sgl_kvfetch.codec.layout.frames import (
    FILL,
    FLAT,
    MIN_PICTURE,
    PICTURE_MULTIPLE,
    RESOLUTIONS,
    Layout,
    RegionLayout,
    TileLayout,
    region_layout,
    tile_layout,
)
from sgl_kvfetch.errors import FormatError

GEOMETRIES = [(1, 48), (2, 64), (3, 80), (7, 96), (8, 128), (5, 112), (128, 256), (128, 48), (1, 576)]


def random_integers(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(shape[0]), dtype=torch.uint8)


def require_bijection(layout: Layout, integers: torch.Tensor) -> None:
    shape = tuple(integers.shape)
    frames = layout.to_frames(integers)
    assert frames.shape == layout.frames_shape(shape) == (layout.num_frames(shape), 3, layout.height, layout.width)
    assert frames.is_contiguous()
    assert torch.equal(layout.from_frames(frames, shape), integers)
    assert frames.to(torch.int64).sum() - integers.to(torch.int64).sum() == FILL * (frames.numel() - integers.numel())


def require_takes_every_decoder(layout: Layout) -> None:
    for side in (layout.width, layout.height):
        assert side >= MIN_PICTURE
        assert side % PICTURE_MULTIPLE == 0


@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize(("num_heads", "head_dim"), GEOMETRIES)
def test_tiles_and_back(num_heads: int, head_dim: int, num_layers: int) -> None:
    for num_tokens in (1, 16, 63):
        layout = tile_layout(num_heads, head_dim, 64)
        require_bijection(layout, random_integers(num_tokens, num_layers, num_heads, head_dim))


TILES = {"width": 144, "height": 144, "head_rows": 2, "head_cols": 2, "dim_rows": 3, "dim_cols": 4}
REGIONS = {"width": 144, "height": 144, "token_rows": 16, "token_cols": 32}


@pytest.mark.parametrize(
    ("layout", "shape", "message"),
    [
        (TileLayout(**TILES | {"head_rows": 1}), (5, 3, 4, 12), "cannot hold 4 heads of 12"),
        (TileLayout(**TILES | {"width": 1}), (5, 3, 4, 12), "exceeds its picture"),
        (TileLayout(**TILES | {"width": 1 << 16, "height": 1 << 16}), (5, 3, 4, 12), r"exceeds \d+ values"),
        (tile_layout(2, 64, 16), (16, 4, 2, 64), "4 layers, expected at most 3"),  # as many as there are colour planes
        (RegionLayout(**REGIONS), (10, 513), "region of 16x32 cannot hold 513 tokens"),
        (RegionLayout(**REGIONS | {"width": 16}), (10, 500), "exceeds its picture"),
    ],
)
def test_layouts_that_hold_too_little_are_refused(layout: Layout, shape: tuple[int, ...], message: str) -> None:
    TileLayout(**TILES).require_fits((5, 3, 4, 12))
    with pytest.raises(FormatError, match=message):
        layout.require_fits(shape)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize(("num_heads", "head_dim"), GEOMETRIES)
def test_tiles_fill_pictures_within_the_resolution(num_heads: int, head_dim: int, resolution: str) -> None:
    layout = tile_layout(8, 128, 1000)
    frames = layout.num_frames((1000, 3, 8, 128))
    assert 1000 * 8 * 128 / (frames * layout.width * layout.height) > 0.8
    for span_tokens in (1, 64, 1024):
        layout = tile_layout(num_heads, head_dim, span_tokens, resolution)
        require_takes_every_decoder(layout)
        width, height = RESOLUTIONS[resolution]
        assert layout.width <= max(width, layout.tile_width, MIN_PICTURE) + PICTURE_MULTIPLE
        assert layout.height <= max(height, layout.tile_height, MIN_PICTURE) + PICTURE_MULTIPLE


@pytest.mark.parametrize("num_tokens", [1, 7, 63, 64, 500, 1024])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 200, 1152])
def test_regions_and_back(count: int, num_tokens: int) -> None:
    for span_tokens in (num_tokens, 1024):
        require_bijection(region_layout(max(count, 100), span_tokens), random_integers(count, num_tokens))


@pytest.mark.parametrize("resolution", RESOLUTIONS)
@pytest.mark.parametrize("span_tokens", [1, 5, 16, 64, 100, 512, 1024, 8192, 1 << 17])
def test_regions_stay_within_the_resolution(span_tokens: int, resolution: str) -> None:
    width, height = RESOLUTIONS[resolution]
    for count in (1, 300, 1500):
        layout = region_layout(count, span_tokens, resolution)
        layout.require_fits((count, span_tokens))
        require_takes_every_decoder(layout)
        assert layout.width <= max(width, layout.token_cols, MIN_PICTURE) + PICTURE_MULTIPLE
        assert layout.height <= max(height, layout.token_rows, MIN_PICTURE) + PICTURE_MULTIPLE
        if span_tokens <= width * 32:
            assert layout.token_cols <= width


def test_flat_frames_begin_with_the_integers() -> None:
    """In their order, if a row has a span's tokens and nothing else."""
    for count, num_tokens in ((1, 1), (7, 33), (9, 64)):
        layout = region_layout(count, num_tokens, FLAT)
        integers = random_integers(count, num_tokens)
        assert layout.begins_with((count, num_tokens))
        assert torch.equal(layout.to_frames(integers).flatten()[: integers.numel()], integers.flatten())
    assert not layout.begins_with((9, 63))
    assert not RegionLayout(width=128, height=1, token_rows=1, token_cols=64).begins_with((9, 64))
    assert not region_layout(9, 64).begins_with((9, 64))


def test_flat_frames_of_tiles_begin_with_a_tokens_integers() -> None:
    """Of as many layers as a picture has planes, they are all the integers in their order."""
    layout = tile_layout(2, 64, 9, FLAT)
    for num_layers in (1, 2, 3):
        integers = torch.randint(256, (9, num_layers, 2, 64), dtype=torch.uint8)
        frames = layout.to_frames(integers).flatten(1)
        assert layout.each_begins_with(tuple(integers.shape))
        assert torch.equal(frames[:, : num_layers * 2 * 64], integers.flatten(1))
        assert layout.begins_with(tuple(integers.shape)) is (num_layers == 3)
    assert not layout.each_begins_with((9, 3, 2, 32))
