import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl_kvfetch.codec.bitstream.hevc import join_access_units, split_access_units
from sgl_kvfetch.codec.bitstream.registry import CODECS, get_codec
from sgl_kvfetch.errors import CorruptError, FormatError

EVERY_CODEC = pytest.mark.parametrize("name", list(CODECS))


def pictures(num_frames: int, height: int, width: int, kind: str = "mixed") -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_frames)
    noise = torch.randint(0, 256, (num_frames, 3, height, width), generator=generator, dtype=torch.uint8)
    if kind == "mixed":
        noise[:, :, : height // 2] //= 16
        noise[:, :, :, : width // 4] = 128
    return noise


@EVERY_CODEC
@pytest.mark.parametrize(("num_frames", "height", "width"), [(1, 144, 144), (9, 144, 152), (1, 480, 856)])
def test_every_value_comes_back(name: str, num_frames: int, height: int, width: int) -> None:
    size = smaller(name, height), smaller(name, width)
    frames = pictures(num_frames, *size)
    codec = get_codec(name)
    assert torch.equal(codec.decode(codec.encode(frames), (num_frames, *size)), frames)


def smaller(name: str, side: int) -> int:
    """`ans-tables` has tables for each pixel: it is meant for a few hundred of them."""
    return side // 8 if name == "ans-tables" else side


@EVERY_CODEC
def test_extreme_values_come_back(name: str) -> None:
    codec, side = get_codec(name), smaller(name, 144)
    for frames in (pictures(1, side, side, "noise"), torch.zeros((2, 3, side, side), dtype=torch.uint8)):
        for values in (frames, 255 - frames):
            assert torch.equal(codec.decode(codec.encode(values), (len(frames), side, side)), values)


@EVERY_CODEC
def test_many_threads_at_once(name: str) -> None:
    codec, side = get_codec(name), smaller(name, 144)
    inputs = [pictures(n, side, side) for n in (1, 2, 3, 1, 2, 3, 1, 2)]

    def there_and_back(frames: torch.Tensor) -> bool:
        return torch.equal(codec.decode(codec.encode(frames), (len(frames), side, side)), frames)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(there_and_back, inputs))


@EVERY_CODEC
def test_a_bitstream_of_another_shape_is_corrupt(name: str) -> None:
    codec, side = get_codec(name), smaller(name, 144)
    bitstream = codec.encode(pictures(2, side, side))
    for shape in ((1, side, side), (3, side, side), (2, side + 8, side), (2, side, side + 16)):
        with pytest.raises(CorruptError):
            codec.decode(bitstream, shape)


@EVERY_CODEC
def test_cut_and_foreign_bitstreams_are_corrupt(name: str) -> None:
    codec, side = get_codec(name), smaller(name, 144)
    bitstream = codec.encode(pictures(2, side, side))
    for bad in (b"", b"\0", bitstream[:-9], bitstream[: len(bitstream) // 2], b"\xff" * 100, bitstream[8:]):
        with pytest.raises(CorruptError):
            codec.decode(bad, (2, side, side))


@EVERY_CODEC
def test_flipped_bytes_decode_to_the_shape_or_are_corrupt(name: str) -> None:
    """A codec may miss a flipped byte: that is what the checksums are for. It must not do anything else."""
    codec, side = get_codec(name), smaller(name, 144)
    bitstream = codec.encode(pictures(2, side, side))
    for position in range(0, len(bitstream), max(1, len(bitstream) // 50)):
        bad = bytearray(bitstream)
        bad[position] ^= 0x55
        with contextlib.suppress(CorruptError):
            assert codec.decode(bytes(bad), (2, side, side)).shape == (2, 3, side, side)


def test_a_decompression_bomb_is_corrupt() -> None:
    for name in ("zstd", "deflate"):
        codec = get_codec(name)
        bomb = codec.compress(bytes(1 << 26))  # type: ignore[attr-defined]
        with pytest.raises(CorruptError):
            codec.decode(bomb, (1, 144, 144))


def test_unknown_codec_is_named() -> None:
    with pytest.raises(FormatError, match="'av1' is unknown; known are hevc"):
        get_codec("av1")


def test_access_units() -> None:
    units = [b"one", b"", b"three"]
    assert [bytes(u) for u in split_access_units(join_access_units(units))] == units
    with pytest.raises(CorruptError, match="claims"):
        split_access_units(b"\xff\xff\xff\xff")
    with pytest.raises(CorruptError, match="accounts for"):
        split_access_units(join_access_units(units) + b"x")


def test_pictures_are_predicted_from_those_before_them() -> None:
    """So a bitstream's beginning gives its first pictures, exactly."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (1, 3, 144, 152), generator=generator)
    drift = torch.randint(-1, 2, (6, 3, 144, 152), generator=generator).cumsum(0)
    frames = (first + drift).clamp(0, 255).to(torch.uint8)
    codec = get_codec("hevc")
    units = [bytes(unit) for unit in split_access_units(codec.encode(frames))]
    assert max(map(len, units[1:])) < len(units[0]) / 2
    for end in range(1, 7):
        assert torch.equal(codec.decode(join_access_units(units[:end]), (end, 144, 152)), frames[:end])


def test_a_picture_is_one_access_unit_that_starts_with_its_parameter_sets() -> None:
    """What NVDEC needs to be fed without a demuxer: Annex B, and VPS, SPS, PPS in the first access unit."""
    units = split_access_units(get_codec("hevc").encode(pictures(5, 144, 144)))
    assert len(units) == 5
    first = bytes(units[0])
    types = [(first[i + 3] >> 1) & 0x3F for i in range(len(first) - 3) if first[i : i + 3] == b"\0\0\1"]
    assert types[:3] == [32, 33, 34]


@pytest.mark.parametrize("name", ["hevc", "hevc420"])
@pytest.mark.parametrize(("height", "width"), [(144, 144), (152, 160), (1080, 1920)])
def test_parameter_sets_signal_a_level_that_hardware_knows(name: str, height: int, width: int) -> None:
    """x265 signals level 8.5 for lossless video: none. The decoded pictures are the same, as other tests check."""
    first, *_ = split_access_units(get_codec(name).encode(pictures(1, height, width)))
    levels = {}
    for unit in bytes(first).split(b"\0\0\1")[1:]:
        raw = unit.replace(b"\0\0\3", b"\0\0")  # without emulation prevention
        # ITU-T H.265, 7.3.1 to 7.3.3: headers, and then general_level_idc after 88 bits of profile_tier_level
        match raw[0] >> 1 & 63:
            case 32:
                levels["VPS"] = raw[2 + 4 + 11]
            case 33:
                levels["SPS"] = raw[2 + 1 + 11]
    assert levels == {"VPS": 153, "SPS": 153}  # 30 times 5.1
