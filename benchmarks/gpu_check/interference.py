"""Measures a matrix product's speed alone and during decoding, since NVDEC should cost no SM time."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from benchmarks.gpu_check.clips import SIZES, make_frames
from benchmarks.gpu_check.record import Record, SkippedError
from benchmarks.gpu_check.timing import make_product, make_timer
from sgl_kvfetch.codec.bitstream.base import FrameDecoder
from sgl_kvfetch.codec.bitstream.nvdec import open_nvdec
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.cuda_streams import Device

GOAL = 0.01  # largest allowed slow-down
_SIDE = 8192
_ROUNDS = 5  # alternating between alone and during decoding


def run(record: Record) -> None:
    torch.zeros(1, device="cuda")
    device = torch.device("cuda", 0)
    nvdec, about = open_nvdec(Device(device))
    if nvdec is None:
        raise SkippedError(about)
    sessions = [nvdec.open_session() for _ in range(2 * nvdec.num_engines)]
    for name in nvdec.codecs:
        for count in (nvdec.num_engines, 2 * nvdec.num_engines):
            measure(record, name, [session[name] for session in sessions[:count]], device, _SIDE)


def measure(
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
