"""Checks NVDEC with our bitstreams: exact bits, throughput. Memory and waits of its decoders are in `nvdec_decoders`,
damaged bitstreams in `nvdec_damage`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.gpu_check import nvdec_decoders
from benchmarks.gpu_check.clips import SIZES, make_frames
from benchmarks.gpu_check.record import Record, SkippedError
from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream.base import Decoders, FrameDecoder
from sgl_kvfetch.codec.bitstream.nvdec import Nvdec, decode_caps, open_nvdec
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.errors import CorruptError

_SECONDS = 0.3  # per measurement
_LAST_S = 20.0  # with less time left, nothing is encoded and measured any more
# The clips to measure, in this order: bits of noise by size, as in `make_frames`. They take 0.1 to 7 bits per value.
_CLIPS: dict[str, Sequence[int]] = {"240p": range(7), "1080p": (1, 3, 6), "480p": (3,), "640p": (3,)}
_LOW_CLIPS: dict[str, Sequence[int]] = {"240p": (3,), "1080p": (3,)}


def run(record: Record) -> None:
    nvdec = find_nvdec(record)
    session = nvdec.open_session()  # one session decodes all sizes
    check_bits(record, session, list(SIZES))
    nvdec_decoders.measure_memory(record, nvdec, list(SIZES))
    nvdec_decoders.measure_gaps(record, nvdec)
    counts = _session_counts(nvdec.num_engines)
    measure(record, nvdec, counts, _CLIPS)
    measure(record, with_low_latency(nvdec), counts, _LOW_CLIPS, latency="LOW")


def find_nvdec(record: Record) -> Nvdec:
    """Open NVDEC and record its capabilities. Raises SkippedError."""
    torch.zeros(1, device="cuda")  # creates the CUDA context
    nvdec, about = open_nvdec(Device(torch.device("cuda", 0)))
    try:
        caps = decode_caps()
    except OSError:
        caps = {}
    if caps and (nvdec is None or len(nvdec.codecs) < len(caps)):
        record.fail(about)
    if nvdec is None:
        raise SkippedError(about)
    nvdec.surface_limit_bytes = None  # all sessions must be able to decode at once, even 1080p
    record.row("Video engines", found=about)
    for name, found in caps.items():
        record.row("Video engines", found=f"{name}: up to {found.max_width}x{found.max_height}")
    return nvdec


def check_bits(record: Record, decoders: Decoders, sizes: Sequence[str]) -> None:
    """Decode all sizes in increasing and decreasing order, so that each decoder is used again after others."""
    for name, decoder in decoders.items():
        coded: dict[str, tuple[torch.Tensor, bytes]] = {}
        for size in [*sizes, *reversed(sizes)]:
            if size not in coded:
                frames = make_frames(*SIZES[size])
                coded[size] = frames, get_codec(name).encode(frames)
            frames, bitstream = coded[size]
            wrong = what_is_wrong(decoder, bitstream, frames)
            record.row("NVDEC: bits", codec=name, size=size, pictures=len(frames), found=wrong or "equal")
            if wrong:
                record.fail(f"{name} {size}: {wrong}")


def what_is_wrong(decoder: FrameDecoder, bitstream: bytes, frames: torch.Tensor) -> str:
    num_frames, _, height, width = frames.shape
    try:
        found = decoder.decode(bitstream, (num_frames, height, width))
    except CorruptError as e:
        return str(e)
    if found.on_cpu:
        return "decoded on the CPU"
    return "" if torch.equal(found.frames, frames) else "other pixels"


def with_low_latency(nvdec: Nvdec) -> Nvdec:
    """Return the same engines with decoders that return each picture before they decode the next."""
    low = Nvdec(_LowLatency(nvdec.nvc), nvdec.device, nvdec._caps)
    low.surface_limit_bytes = None
    return low


class _LowLatency:
    """The module PyNvVideoCodec, with another latency."""

    def __init__(self, nvc: Any) -> None:
        self._nvc = nvc

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvc, name)

    def CreateDecoder(self, **options: Any) -> Any:
        return self._nvc.CreateDecoder(**{**options, "latency": self._nvc.DisplayDecodeLatencyType.LOW})


def _session_counts(num_engines: int) -> list[int]:
    return sorted({1, num_engines, 2 * num_engines, 3 * num_engines})


def measure(
    record: Record,
    nvdec: Nvdec,
    session_counts: Sequence[int],
    clips: Mapping[str, Sequence[int]],
    *,
    latency: str = "NATIVE",
    seconds: float = _SECONDS,
) -> None:
    """Measure how fast ``clips``, bits of noise by size, are decoded to the host. Verifying is not included."""
    sessions = [nvdec.open_session() for _ in range(max(session_counts))]
    for size, noises in clips.items():
        frames = {bits: make_frames(*SIZES[size], bits) for bits in noises}
        for name in nvdec.codecs:
            if record.left_s < _LAST_S:
                record.note(f"NVDEC: throughput with latency {latency}, {name} {size} was left out: no time was left")
                continue
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                bitstreams = list(threads.map(get_codec(name).encode, frames.values()))
            for clip, bitstream in zip(frames.values(), bitstreams, strict=True):
                columns = {"codec": name, "size": size, "bits_a_value": 8 * len(bitstream) / clip.numel()}
                alone = 0.0
                for count in session_counts:
                    decoders = [session[name] for session in sessions[:count]]
                    rate = decode_rate(decoders, bitstream, clip.shape, seconds)
                    alone = alone or rate
                    megabits = 8 * len(bitstream) / clip.numel() * rate / 1e6
                    record.row(
                        "NVDEC: throughput by sessions",
                        **columns,
                        latency=latency,
                        sessions=count,
                        gb_of_values_a_second=rate / 1e9,
                        mbit_a_second=megabits,
                        mbit_a_second_an_engine=megabits / min(count, nvdec.num_engines),
                        share_of_sessions_times_one=rate / (count * alone),
                    )
            drop_decoders(nvdec)


def decode_rate(decoders: Sequence[FrameDecoder], bitstream: bytes, shape: Sequence[int], seconds: float) -> float:
    """Return the bytes of frames decoded per second, with one thread per decoder."""
    num_frames, _, height, width = shape
    is_over = threading.Event()

    def decode(decoder: FrameDecoder) -> None:
        decoder.decode(bitstream, (num_frames, height, width))

    def work(decoder: FrameDecoder) -> int:
        count = 0
        while not is_over.is_set():
            decode(decoder)
            count += 1
        return count

    with ThreadPoolExecutor(len(decoders)) as threads:
        list(threads.map(decode, decoders))  # warm
        started_s = time.monotonic()
        timer = threading.Timer(seconds, is_over.set)
        timer.start()
        try:
            total = sum(threads.map(work, decoders))
        finally:
            is_over.set()
        elapsed_s = time.monotonic() - started_s
    return total * num_frames * 3 * height * width / elapsed_s
