"""Compares the CPU cost of verifying decoded frames with that of encoding and decoding them. Frames are verified by
their frame sum, which a GPU could compute, too, or by the checksum of their integers.

    python -m benchmarks.checksums [--tokens N]

The data is one layer group of eight heads of 128 that drift along the tokens. One thread is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import xxhash

from benchmarks.gpu_check.timing import seconds_of
from benchmarks.report import make_parser, whole_number
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.layout.frame_sum import sum_of_frames
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.codec.layout.tiles import tile_layout

HEADS, DIM = 8, 128


def measure(num_tokens: int, *, repeats: int = 5) -> dict[str, float]:
    """Return the MB of frames per second, for each operation."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.randint(-2, 3, (num_tokens, PLANES, HEADS, DIM), generator=generator)
    integers = (128 + steps.cumsum(0)).clamp(0, 255).to(torch.uint8)
    layout = tile_layout(HEADS, DIM, num_tokens)
    frames = layout.to_frames(integers)
    codec = get_codec("hevc")
    bitstream = codec.encode(frames)

    def verify_integers() -> None:
        xxhash.xxh3_128_digest(layout.from_frames(frames, tuple(integers.shape)).numpy().data)

    work: dict[str, Callable[[], object]] = {
        "frame sum": lambda: sum_of_frames(frames),
        "integers out of the frames, and their checksum": verify_integers,
        "encode hevc": lambda: codec.encode(frames),
        "decode hevc": lambda: codec.decode(bitstream, (frames.shape[0], layout.height, layout.width)),
    }
    cpu = torch.device("cpu")
    return {name: frames.nbytes / seconds_of(do, cpu, repeats=repeats, warm_ups=1) / 1e6 for name, do in work.items()}


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.checksums", __doc__)
    parser.add_argument("--tokens", type=whole_number, default=1024, help="of the data")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for name, rate in measure(options.tokens).items():
        print(f"{rate:8.1f} MB/s  {name}")


if __name__ == "__main__":
    main()
