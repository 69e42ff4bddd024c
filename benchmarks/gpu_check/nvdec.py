"""Checks NVDEC with our bitstreams, and measures it: throughput, memory and waits of its decoders, and what it costs a
matrix product.

Damaged bitstreams are a step of their own, after all others: a decoder or driver may fail in ways that spoil what comes
next.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_check.record import Record, SkippedError
from benchmarks.gpu_check.timing import Ticker, make_busy, make_product, make_timer
from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream.base import Decoders, FrameDecoder
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS, HevcCodec
from sgl_kvfetch.codec.bitstream.nvdec import (
    Nvdec,
    NvdecDecoder,
    PictureSize,
    decode_caps,
    open_nvdec,
    surface_bytes,
)
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.errors import CorruptError

SIZES = {  # number of pictures, height, width
    "smallest": (1, 144, 144),
    "240p": (9, 240, 432),
    "480p": (4, 480, 856),
    "640p": (3, 640, 1136),
    "1080p": (2, 1080, 1920),
}
_SECONDS = 0.3  # per measurement, and of the work that keeps the device busy
_LAST_S = 20.0  # with less time left, nothing is encoded and measured any more
# The clips to measure, in this order: bits of noise by size, as in `make_frames`. They take 0.1 to 7 bits per value.
_CLIPS: dict[str, Sequence[int]] = {"240p": range(7), "1080p": (1, 3, 6), "480p": (3,), "640p": (3,)}
_LOW_CLIPS: dict[str, Sequence[int]] = {"240p": (3,), "1080p": (3,)}
_MEASURED_SESSIONS = 8
_SMALL, _LARGE = "240p", "1080p"  # what a decoder is reconfigured between
_FLIPS = 40
GOAL = 0.01  # largest allowed slow-down
_SIDE = 8192
_ROUNDS = 5  # alternating between alone and during decoding


def run(record: Record) -> None:
    nvdec = find_nvdec(record)
    session = nvdec.open_session()  # one session decodes all sizes
    check_bits(record, session, list(SIZES))
    measure_memory(record, nvdec, list(SIZES))
    measure_gaps(record, nvdec)
    counts = _session_counts(nvdec.num_engines)
    measure(record, nvdec, counts, _CLIPS)
    measure(record, with_low_latency(nvdec), counts, _LOW_CLIPS, latency="LOW")


def _opened() -> tuple[Nvdec, str]:
    """Return NVDEC and what it is. Raises SkippedError."""
    torch.zeros(1, device="cuda")  # creates the CUDA context
    nvdec, about = open_nvdec(Device(torch.device("cuda", 0)))
    if nvdec is None:
        raise SkippedError(about)
    return nvdec, about


def find_nvdec(record: Record) -> Nvdec:
    """Open NVDEC and record its capabilities. Raises SkippedError."""
    torch.zeros(1, device="cuda")  # the context in which `decode_caps` asks
    try:
        caps = decode_caps()
    except OSError:
        caps = {}
    try:
        nvdec, about = _opened()
    except SkippedError as e:
        if caps:
            record.fail(str(e))
        raise
    if len(nvdec.codecs) < len(caps):
        record.fail(about)
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


def measure_memory(record: Record, nvdec: Nvdec, sizes: Sequence[str], *, seconds: float = _SECONDS) -> None:
    """Compare the memory counted for a decoder with that taken on the device. Several are made of each size, since the
    driver takes memory in large blocks."""
    sessions = [nvdec.open_session() for _ in range(_MEASURED_SESSIONS)]
    for name in nvdec.codecs:
        for size in sizes:
            _, height, width = SIZES[size]
            frames = make_frames(1, height, width)
            bitstream = HEVC_CODECS[name].encode(frames)
            jobs = [partial(session[name].decode, bitstream, (1, height, width)) for session in sessions]
            drop_decoders(nvdec)
            before = _bytes_beside_torch()
            with decoding(jobs):
                time.sleep(seconds)
            counted = nvdec.held_surface_bytes
            count = counted // surface_bytes(HEVC_CODECS[name].planes_a_picture, width, height)
            held = _bytes_beside_torch() - before
            drop_decoders(nvdec)
            if not count:
                record.fail(f"{name} {size}: NVDEC gave no decoder")
                continue
            record.row(
                "NVDEC: memory of a decoder",
                codec=name,
                size=size,
                decoders=count,
                counted_mb=counted / count / 1e6,
                taken_mb=held / count / 1e6,
                kept_after_destruction_mb=(_bytes_beside_torch() - before) / count / 1e6,
            )


def _bytes_beside_torch() -> int:
    """Return the bytes in use on the device, without those of torch's allocator."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measure_gaps(record: Record, nvdec: Nvdec, *, seconds: float = _SECONDS, side: int = 4096) -> None:
    """Measure the longest gap of a 1 ms ticker during all that happens to decoders, on an idle and on a busy device.
    ``side``: rows of the matrices that keep the device busy."""
    name = nvdec.codecs[0]
    codec, shapes = HEVC_CODECS[name], [SIZES[size] for size in (_SMALL, _LARGE)]
    clips = [(codec.encode(make_frames(*shape)), shape) for shape in shapes]
    bitstream, shape = clips[0]
    sessions = [nvdec.open_session() for _ in range(2 * nvdec.num_engines)]
    jobs = [partial(session[name].decode, bitstream, shape) for session in sessions]

    def decode() -> None:
        with decoding(jobs):
            time.sleep(seconds)

    def create() -> None:
        with ThreadPoolExecutor(len(jobs)) as threads:
            list(threads.map(lambda job: job(), jobs))

    # Each of these needs the decoders of the one before it.
    activities: list[tuple[str, Callable[[], object]]] = [
        ("nothing", lambda: time.sleep(seconds)),
        ("creating decoders", create),
        ("decoding", decode),
        ("reconfiguring a decoder", lambda: reconfigure(nvdec, codec, clips)),
        ("destroying decoders", partial(drop_decoders, nvdec)),
    ]
    busy = make_busy(seconds, nvdec.torch_device, side)
    for is_busy in (False, True):
        drop_decoders(nvdec)
        for activity, work in activities:
            if is_busy:
                busy()
            problem, started_s = "", time.perf_counter()
            with Ticker() as ticker:
                try:
                    work()
                except CorruptError as e:
                    problem = str(e)
            record.row(
                "The longest gap of a 1 ms ticker",
                beside=activity,
                device="busy" if is_busy else "idle",
                sessions=len(sessions),
                took_ms=1e3 * (time.perf_counter() - started_s),
                longest_gap_ms=1e3 * ticker.longest_s,
                problem=problem,
            )
            torch.cuda.synchronize()


def reconfigure(nvdec: Nvdec, codec: HevcCodec, clips: Sequence[tuple[bytes, tuple[int, int, int]]]) -> None:
    """Decode all clips, bitstreams and shapes, on one decoder that is reconfigured before each, as the serving path
    never does. Raises CorruptError."""
    ours = nvdec.open_session()[codec.name]
    assert isinstance(ours, NvdecDecoder)
    width, height = (max(shape[axis] for _, shape in clips) for axis in (2, 1))
    with nvdec.borrow_decoder(PictureSize(codec.planes_a_picture, width, height)) as decoder:
        for bitstream, (num_frames, height, width) in [*clips, *reversed(clips)]:
            decoder.handle.setReconfigParams(width, height)
            frames = nvdec.device.empty((num_frames, 3, height, width), decoder.stream)
            ours.fill_frames(decoder, codec.access_units(bitstream, num_frames), frames)


def run_interference(record: Record) -> None:
    """Measure a matrix product's speed alone and during decoding, since NVDEC should cost no SM time."""
    nvdec, _ = _opened()
    device = torch.device("cuda", 0)
    sessions = [nvdec.open_session() for _ in range(2 * nvdec.num_engines)]
    for name in nvdec.codecs:
        for count in (nvdec.num_engines, 2 * nvdec.num_engines):
            measure_interference(record, name, [session[name] for session in sessions[:count]], device, _SIDE)


def measure_interference(
    record: Record,
    name: str,
    decoders: Sequence[FrameDecoder],
    device: torch.device,
    side: int,
    *,
    rounds: int = _ROUNDS,
    repeats: int = 50,
) -> None:
    """Measure both speeds. Each of ``decoders`` has its own session, and runs on its own thread."""
    frames = make_frames(*SIZES["240p"])
    num_frames, _, height, width = frames.shape
    bitstream = get_codec(name).encode(frames)
    jobs = [partial(decoder.decode, bitstream, (num_frames, height, width)) for decoder in decoders]
    time_products = make_timer(make_product(device, side), device, repeats=repeats)
    alone, beside, decoded = [], [], 0
    for _ in range(rounds):
        alone += time_products()
        with decoding(jobs) as count:
            beside += time_products()
        decoded += count[0]
    slower = statistics.median(beside) / statistics.median(alone) - 1
    record.row(
        "A matrix product beside decoding",
        codec=name,
        sessions=len(decoders),
        side=side,
        alone_ms=1e3 * statistics.median(alone),
        beside_ms=1e3 * statistics.median(beside),
        slower_percent=100 * slower,
        bitstreams_decoded_meanwhile=decoded,
    )
    if not decoded:
        record.fail(f"{name}, {len(decoders)} sessions: nothing was decoded beside the matrix product")
    if slower > GOAL:
        record.note(
            f"{name}, {len(decoders)} sessions: the matrix product is {slower:.1%} slower beside decoding; "
            f"the goal is {GOAL:.0%}"
        )


@contextmanager
def decoding(jobs: Sequence[Callable[[], object]]) -> Iterator[list[int]]:
    """Repeat the jobs until the context ends, each on its own thread. The list's only item counts the runs."""
    is_over, lock, count = threading.Event(), threading.Lock(), [0]

    def work(decode: Callable[[], object]) -> None:
        while not is_over.is_set():
            decode()
            with lock:
                count[0] += 1

    with ThreadPoolExecutor(len(jobs)) as threads:
        done = threads.map(work, jobs)
        time.sleep(0.1)
        try:
            yield count
        finally:
            is_over.set()
        list(done)  # raises a thread's exception


def run_damage(record: Record) -> None:
    check_damage(record, _opened()[0].open_session())


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


def make_frames(num_frames: int, height: int, width: int, noise_bits: int = 4) -> torch.Tensor:
    """Return uint8 ``(frames, 3, height, width)`` that vary slowly from picture to picture, as tokens do, with noise
    of ``noise_bits`` bits added. Encoded, a value takes up to a bit more than its noise."""
    generator = torch.Generator().manual_seed(num_frames)
    shape = (num_frames, 3, height, width)
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    offset = (rows + columns) // 8 % 128
    drift = torch.arange(num_frames).view(-1, 1, 1, 1)
    noise = torch.randint(0, 1 << noise_bits, shape, generator=generator)
    return (offset + drift + noise).clamp(0, 255).to(torch.uint8)
