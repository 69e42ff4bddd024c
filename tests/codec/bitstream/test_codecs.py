"""What every codec promises: its integers come back, whoever wrote them, and any other bytes are corrupt."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zstandard
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, AnsTablesCodec
from sgl_kvfetch.codec.bitstream.base import Codec
from sgl_kvfetch.codec.bitstream.hevc import join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.registry import CODECS, get_codec
from sgl_kvfetch.errors import CorruptError
from tests.codec.bitstream.mutations import share_that_is_corrupt

IMPLEMENTATIONS = CODECS | {
    "ans without vectors": AnsCodec(is_portable=True),
    "ans-tables without vectors": AnsTablesCodec(is_portable=True),
}
EVERY_CODEC = pytest.mark.parametrize("codec", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))


def pictures(num_frames: int, height: int = 144, width: int = 144, kind: str = "mixed") -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_frames)
    noise = torch.randint(0, 256, (num_frames, 3, height, width), generator=generator, dtype=torch.uint8)
    if kind == "mixed":
        noise[:, :, : height // 2] //= 16
        noise[:, :, :, : width // 4] = 128
    return noise


def come_back(codec: Codec, frames: torch.Tensor) -> bool:
    bitstream = codec.encode(frames)
    assert codec.encode(frames) == bitstream
    return torch.equal(codec.decode(bitstream, (len(frames), *frames.shape[2:])), frames)


def smaller(codec: Codec, side: int) -> int:
    """`ans-tables` has tables for each pixel: it is meant for a few hundred of them."""
    return side // 8 if codec.name == "ans-tables" else side


@EVERY_CODEC
def test_every_value_comes_back(codec: Codec) -> None:
    for num_frames, height, width in ((1, 144, 144), (9, 144, 152), (1, 480, 856)):
        assert come_back(codec, pictures(num_frames, smaller(codec, height), smaller(codec, width)))
    side = smaller(codec, 144)
    for frames in (pictures(1, side, side, "noise"), torch.zeros((2, 3, side, side), dtype=torch.uint8)):
        assert come_back(codec, frames)
        assert come_back(codec, 255 - frames)


@pytest.mark.parametrize("name", [name for name, codec in IMPLEMENTATIONS.items() if not codec.is_video])
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_bytes_come_back(name: str, data: st.DataObject) -> None:
    num_frames, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 70))
    size = num_frames * 3 * width
    values = data.draw(st.binary(min_size=size, max_size=size))
    frames = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(num_frames, 3, 1, width)
    assert come_back(IMPLEMENTATIONS[name], frames)


@EVERY_CODEC
def test_many_threads_at_once(codec: Codec) -> None:
    side = smaller(codec, 144)
    inputs = [pictures(n, side, side) for n in (1, 2, 3, 1, 2, 3, 1, 2)]
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda frames: come_back(codec, frames), inputs))


@EVERY_CODEC
def test_other_shapes_and_other_bytes_are_corrupt(codec: Codec) -> None:
    side = smaller(codec, 144)
    good = codec.encode(pictures(2, side, side))
    for shape in ((1, side, side), (3, side, side), (2, side + 8, side), (2, side, side + 16)):
        with pytest.raises(CorruptError):
            codec.decode(good, shape)
    for bad in (b"", b"\0", good[:-9], good[: len(good) // 2], b"\xff" * 100, good[8:], good + b"x", good + good):
        with pytest.raises(CorruptError):
            codec.decode(bad, (2, side, side))


@pytest.mark.slow
@EVERY_CODEC
def test_changed_bytes_decode_to_the_shape_or_are_corrupt(codec: Codec) -> None:
    """A codec may miss a flipped byte: that is what the checksums are for. It must not do anything else. The ends of
    the states of `ans` tell nearly all."""
    is_ans, side = codec.name.startswith("ans"), smaller(codec, 144)
    sides = [(n, 1, 10) for n in (3, 40, 128, 300)] if is_ans else [(2, side, side)]
    cases = []
    for num_frames, height, width in sides:
        frames = pictures(num_frames, height, width)
        shape = num_frames, height, width
        cases.append((codec.encode(frames), frames, lambda bad, shape=shape: codec.decode(bad, shape)))
    found = share_that_is_corrupt(cases, 20_000 if is_ans else 60, head_bytes=300)
    assert not is_ans or found > 0.98


def test_other_sizes_than_that_of_the_frames_are_corrupt() -> None:
    """Bombs, and what does not state its size."""
    raw = bytes(3 * 144 * 144)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(raw)
    bombs = [(name, get_codec(name).compress(bytes(1 << 26))) for name in ("zstd", "deflate")]  # type: ignore[attr-defined]
    for name, bad in (*bombs, ("zstd", silent), ("zstd", zstandard.compress(raw + b"x"))):
        with pytest.raises(CorruptError):
            get_codec(name).decode(bad, (1, 144, 144))


def test_pictures_are_predicted_from_those_before_them() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (1, 3, 144, 152), generator=generator)
    drift = torch.randint(-1, 2, (6, 3, 144, 152), generator=generator).cumsum(0)
    units = split_access_units(get_codec("hevc").encode((first + drift).clamp(0, 255).to(torch.uint8)))
    assert max(map(len, units[1:])) < len(units[0]) / 2


@pytest.mark.parametrize("name", ["hevc", "hevc420"])
@pytest.mark.parametrize(("height", "width"), [(144, 144), (1080, 1920)])
def test_hardware_can_be_fed_without_a_demuxer(name: str, height: int, width: int) -> None:
    """Annex B: a picture is an access unit, and the first one begins with parameter sets. They signal a level that
    hardware knows; x265's own for lossless video is 8.5, which is none."""
    units = split_access_units(bitstream := get_codec(name).encode(pictures(2, height, width)))
    assert len(units) == (2 if name == "hevc" else 6)
    assert join_access_units([bytes(unit) for unit in units]) == bitstream
    # Without start codes and emulation prevention.
    first = [unit.replace(b"\0\0\3", b"\0\0") for unit in bytes(units[0]).split(b"\0\0\1")[1:]]
    assert [unit[0] >> 1 & 63 for unit in first[:3]] == [32, 33, 34]  # VPS, SPS, PPS
    # ITU-T H.265, 7.3.1 to 7.3.3: headers, and then general_level_idc after 88 bits of profile_tier_level
    assert (first[0][2 + 4 + 11], first[1][2 + 1 + 11]) == (153, 153)  # 30 times 5.1
