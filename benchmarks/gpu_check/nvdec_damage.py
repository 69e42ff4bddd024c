"""Decodes damaged bitstreams on NVDEC.

This is a step of its own, after all others: a decoder or driver may fail in ways that spoil what comes next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu_check.clips import make_frames
from benchmarks.gpu_check.nvdec import what_is_wrong
from benchmarks.gpu_check.record import Record, SkippedError
from sgl_kvfetch.codec.bitstream.base import Decoders, FrameDecoder
from sgl_kvfetch.codec.bitstream.nvdec import open_nvdec
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.errors import CorruptError

_FLIPS = 40


def run(record: Record) -> None:
    torch.zeros(1, device="cuda")  # creates the CUDA context
    nvdec, about = open_nvdec(Device(torch.device("cuda", 0)))
    if nvdec is None:
        raise SkippedError(about)
    check_damage(record, nvdec.open_session())


def check_damage(record: Record, decoders: Decoders) -> None:
    """Decode damaged bitstreams. Each must decode to the right number of pictures or raise CorruptError, and the next
    good bitstream must decode correctly. Wrong pixels are no failure here: checksums detect them."""
    frames = make_frames(6, 144, 144)
    for name, decoder in decoders.items():
        good = get_codec(name).encode(frames)
        for kind, damaged in (("cut", _cut(good)), ("a byte flipped", _flipped(good))):
            counts = {"corrupt": 0, "other pixels": 0, "as if whole": 0}
            for index, bad in enumerate(damaged):
                print(f"{name}, {kind}, number {index}", flush=True)  # a crash leaves this in the log
                counts[_outcome(decoder, bad, frames)] += 1
                if wrong := what_is_wrong(decoder, good, frames):
                    record.fail(f"{name} after a bitstream with {kind}: {wrong}")
                    break
            record.row("NVDEC: damaged bitstreams", codec=name, damage=kind, **counts)


def _outcome(decoder: FrameDecoder, bad: bytes, frames: torch.Tensor) -> str:
    num_frames, _, height, width = frames.shape
    try:
        found = decoder.decode(bad, (num_frames, height, width))
    except CorruptError:
        return "corrupt"
    return "as if whole" if torch.equal(found.frames, frames) else "other pixels"


def _cut(good: bytes) -> Iterator[bytes]:
    for share in (0.0, 0.1, 0.5, 0.9):
        yield good[: int(len(good) * share)]
    yield good[:-1]


def _flipped(good: bytes) -> Iterator[bytes]:
    for position in range(0, len(good), max(1, len(good) // _FLIPS)):
        bad = bytearray(good)
        bad[position] ^= 0x55
        yield bytes(bad)
