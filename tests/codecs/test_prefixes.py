"""Partial decoding: a bitstream's beginning gives exactly the first frames."""

from itertools import pairwise

import pytest
import torch

from sgl_kvfetch.codecs.hevc import Hevc420Codec, HevcCodec, access_unit_offsets, join_access_units, table_bytes
from sgl_kvfetch.errors import CorruptError

NUM_FRAMES, HEIGHT, WIDTH = 6, 144, 152
CODECS = [HevcCodec(), Hevc420Codec()]
EVERY_CODEC = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def frames() -> torch.Tensor:
    """Each picture is the one before it, a little changed: the encoder predicts."""
    generator = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (1, 3, HEIGHT, WIDTH), generator=generator)
    drift = torch.randint(-1, 2, (NUM_FRAMES, 3, HEIGHT, WIDTH), generator=generator).cumsum(0)
    return (first + drift).clamp(0, 255).to(torch.uint8)


@EVERY_CODEC
def test_a_prefix_gives_exactly_its_frames(codec: HevcCodec) -> None:
    expected = frames()
    bitstream = codec.encode(expected)
    offsets = access_unit_offsets(bitstream)
    assert offsets[0] == table_bytes(codec.num_access_units(NUM_FRAMES, NUM_FRAMES))
    assert offsets[-1] == len(bitstream)
    for end in range(1, NUM_FRAMES + 1):
        length = offsets[codec.num_access_units(NUM_FRAMES, end)]
        found = codec.decode_prefix(bitstream[:length], NUM_FRAMES, end, HEIGHT, WIDTH)
        assert torch.equal(found, expected[:end])
        with pytest.raises(CorruptError, match="lacks"):
            codec.decode_prefix(bitstream[: length - 1], NUM_FRAMES, end, HEIGHT, WIDTH)


def test_pictures_are_predicted_so_prefixes_are_all_there_is() -> None:
    codec = HevcCodec()
    bitstream = codec.encode(frames())
    sizes = [end - start for start, end in pairwise(access_unit_offsets(bitstream))]
    assert max(sizes[1:]) < sizes[0] / 2


@EVERY_CODEC
def test_a_longer_prefix_than_needed_does_no_harm(codec: HevcCodec) -> None:
    expected = frames()
    bitstream = codec.encode(expected)
    assert torch.equal(codec.decode_prefix(bitstream, NUM_FRAMES, 2, HEIGHT, WIDTH), expected[:2])


@EVERY_CODEC
def test_a_prefix_of_another_bitstream_is_corrupt(codec: HevcCodec) -> None:
    bitstream = codec.encode(frames())
    with pytest.raises(CorruptError, match="another"):
        codec.decode_prefix(bitstream, NUM_FRAMES + 1, 1, HEIGHT, WIDTH)


def test_offsets_need_the_whole_table() -> None:
    bitstream = join_access_units([b"one", b"", b"three"])
    start = table_bytes(3)
    expected = [start, start + 3, start + 3, start + 8]
    assert access_unit_offsets(bitstream) == access_unit_offsets(bitstream[:start]) == expected
    for length in (0, 3, start - 1):
        with pytest.raises(CorruptError):
            access_unit_offsets(bitstream[:length])
