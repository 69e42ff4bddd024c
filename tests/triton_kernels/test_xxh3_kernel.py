"""The kernel of XXH3 and its reference, beside the library."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import xxhash

from sgl_kvfetch.triton_kernels.xxh3 import MIN_BYTES, digest_of, xxh3_sums, xxh3_sums_reference
from tests.triton_kernels.cases import DEVICE

pytestmark = pytest.mark.slow

# The shortest; a whole block, and one byte or stripe beside it; a last stripe at any address.
SIZES = (MIN_BYTES, 255, 256, 257, 1023, 1024, 1025, 1088, 1089, 2048, 3333, 4160)


def random_bytes(num_bytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_bytes)
    return torch.randint(0, 256, (num_bytes,), generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("sums_of", [xxh3_sums, xxh3_sums_reference])
def test_the_librarys_digest_of_every_range(sums_of: Callable[..., torch.Tensor]) -> None:
    """Of noise, and of the extremes."""
    ranges = [(8 * index, size) for index, size in enumerate(SIZES)]
    for data in (random_bytes(8192), *(torch.full((8192,), value, dtype=torch.uint8) for value in (0, 0x80, 0xFF))):
        sums = sums_of(data.to(DEVICE), ranges)
        assert (sums.dtype, sums.shape, sums.device.type) == (torch.int64, (len(ranges), 8), DEVICE.type)
        for (start, size), each in zip(ranges, sums.tolist(), strict=True):
            assert digest_of(each, size) == xxhash.xxh3_128_digest(data[start : start + size].numpy().data), size


DATA = torch.zeros(512, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "taken", "message"),
    [
        (DATA.to(torch.int8), (0, 300), "data is torch.int8"),
        (DATA[:511], (0, 300), "multiple of 8"),
        (DATA.repeat(2)[::2], (0, 300), "contiguous"),
        (DATA, (0, MIN_BYTES - 1), "240 bytes from 0 on, of 512"),
        *((DATA, (start, 300), f"300 bytes from {start} on") for start in (4, 256, -8)),
    ],
)
def test_other_arguments_are_refused(data: torch.Tensor, taken: tuple[int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        xxh3_sums(data, [taken])
