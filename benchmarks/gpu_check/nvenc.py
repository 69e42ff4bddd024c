"""Checks NVENC's bitstreams: exact bits, size, throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.gpu_check.clips import SIZES, make_frames
from benchmarks.gpu_check.record import Record, SkippedError
from sgl_kvfetch.codec.bitstream.base import FrameDecoder, PictureShape
from sgl_kvfetch.codec.bitstream.nvdec import open_nvdec
from sgl_kvfetch.codec.bitstream.nvenc import MAX_SESSIONS, NoEncoderError, NvencEncoder, open_nvenc
from sgl_kvfetch.codec.bitstream.nvidia import encode_caps
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.errors import CorruptError

_SECONDS = 0.6  # per measurement


def run(record: Record) -> None:
    encoders = open_encoders(record)
    nvdec, _ = open_nvdec(Device(torch.device("cuda", 0)))
    check_bits(record, encoders, {} if nvdec is None else nvdec.open_session(), list(SIZES))
    measure(record, encoders, [1, 2, 3, MAX_SESSIONS])


def open_encoders(record: Record) -> Mapping[str, NvencEncoder]:
    """Open the encoders and record their capabilities. Raises SkippedError."""
    encoders, about = open_nvenc(("hevc", "hevc420"), MAX_SESSIONS)
    try:
        caps = encode_caps()
    except OSError:
        caps = {}
    if caps and len(encoders) < len(caps):
        record.fail(about)
    if not encoders:
        raise SkippedError(about)
    record.row("Video encoders", found=about)
    for name, found in caps.items():
        sizes = f"{found.min_width}x{found.min_height} to {found.max_width}x{found.max_height}"
        record.row("Video encoders", found=f"{name}: {found.num_engines} engines, {sizes}")
    return encoders


def check_bits(
    record: Record,
    encoders: Mapping[str, NvencEncoder],
    decoders: Mapping[str, FrameDecoder],
    sizes: Sequence[str],
) -> None:
    """Encode all sizes in increasing and decreasing order, so that encoders of other sizes exist already."""
    for name, encoder in encoders.items():
        clips = {size: make_frames(*SIZES[size]) for size in sizes}
        libx265s_bytes = {size: len(get_codec(name).encode(frames)) for size, frames in clips.items()}
        for size in [*sizes, *reversed(sizes)]:
            frames = clips[size]
            try:
                bitstream = encoder._encode(encoder._kind(frames), frames)  # without the fallback to the CPU
            except NoEncoderError as e:
                record.fail(f"{name} {size}: {e}")
                continue
            found = _compare(get_codec(name).decode, bitstream, frames)
            on_nvdec = ""
            if name in decoders:
                on_nvdec = _compare(partial(_decode_on_nvdec, decoders[name]), bitstream, frames)
            record.row(
                "NVENC: bits",
                codec=name,
                size=size,
                pictures=len(frames),
                found=found,
                on_nvdec=on_nvdec,
                share_of_libx265s_bytes=len(bitstream) / libx265s_bytes[size],
            )
            for wrong in {found, on_nvdec} - {"equal", ""}:
                record.fail(f"{name} {size}: {wrong}")


def _decode_on_nvdec(decoder: FrameDecoder, bitstream: bytes, shape: PictureShape) -> torch.Tensor:
    frames = decoder.decode(bitstream, shape).host
    assert frames is not None
    return frames


def _compare(decode: Callable[..., torch.Tensor], bitstream: bytes, frames: torch.Tensor) -> str:
    num_frames, _, height, width = frames.shape
    try:
        found = decode(bitstream, (num_frames, height, width))
    except CorruptError as e:
        return str(e)
    return "equal" if torch.equal(found, frames) else "other pixels"


def measure(
    record: Record,
    encoders: Mapping[str, NvencEncoder],
    thread_counts: Sequence[int],
    *,
    sizes: Sequence[str] = ("240p", "1080p"),
    seconds: float = _SECONDS,
) -> None:
    """Measure the values encoded per second, including the copy to the device, without any check."""
    for name, encoder in encoders.items():
        for size in sizes:
            frames = make_frames(*SIZES[size])
            on_cpu = encode_rate(get_codec(name).encode, frames, 1, seconds)
            encode = partial(encoder._encode, encoder._kind(frames))
            for count in thread_counts:
                try:
                    rate = encode_rate(encode, frames, count, seconds)
                except NoEncoderError as e:
                    record.note(f"{name} {size}, {count} sessions: {e}")
                    break
                record.row(
                    "NVENC: throughput by sessions",
                    codec=name,
                    size=size,
                    sessions=count,
                    mb_of_values_a_second=rate / 1e6,
                    times_one_cpu_thread=rate / on_cpu,
                )


def encode_rate(
    encode: Callable[[torch.Tensor], bytes], frames: torch.Tensor, num_threads: int, seconds: float
) -> float:
    """Return the bytes of frames encoded per second, on ``num_threads`` threads. Raises what ``encode`` raises."""

    def work(_: int) -> int:
        count = 0
        while time.monotonic() < end_s:
            encode(frames)
            count += 1
        return count

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(lambda _: encode(frames), range(num_threads)))  # warm
        started_s = time.monotonic()
        end_s = started_s + seconds
        total = sum(threads.map(work, range(num_threads)))
        elapsed_s = time.monotonic() - started_s
    return total * frames.numel() / elapsed_s
