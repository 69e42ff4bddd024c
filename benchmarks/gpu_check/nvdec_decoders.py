"""Measures NVDEC's decoders themselves: their memory, and for how long they hold the interpreter lock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from benchmarks.gpu_check.clips import SIZES, make_frames
from benchmarks.gpu_check.interference import decoding
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import Ticker, make_busy
from harness.decoders import drop_decoders
from sgl_kvfetch.codec.bitstream.hevc import HEVC_CODECS, HevcCodec
from sgl_kvfetch.codec.bitstream.nvdec import Nvdec, NvdecDecoder, PictureSize, surface_bytes
from sgl_kvfetch.errors import CorruptError

_SESSIONS = 8
_SECONDS = 0.3  # of decoding, and of the work that keeps the device busy
_SMALL, _LARGE = "240p", "1080p"  # what a decoder is reconfigured between


def measure_memory(record: Record, nvdec: Nvdec, sizes: Sequence[str], *, seconds: float = _SECONDS) -> None:
    """Compare the memory counted for a decoder with that taken on the device. Several are made of each size, since the
    driver takes memory in large blocks."""
    sessions = [nvdec.open_session() for _ in range(_SESSIONS)]
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
