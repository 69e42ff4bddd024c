"""Decode the bitstreams of `ans` on the GPU. Frames stay there, and are verified there by the manifest's checksum.

A bitstream takes a warp, and the warp milliseconds, however many others run beside it. So bitstreams that wait at the
same time are decoded by one launch, whichever threads they come from.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Lock

import numpy as np
import torch
import xxhash

from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.codec.bitstream.base import DecodedFrames, FrameDecoder, PictureShape
from sgl_kvfetch.codec.cuda_streams import Device, Event, Stream
from sgl_kvfetch.codec.layout.frames import PLANES
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.log import LimitedLogger, brief
from sgl_kvfetch.triton_kernels.ans import MAX_BYTES, AnsChunk, ans_decode
from sgl_kvfetch.triton_kernels.xxh3 import MIN_BYTES, SUMS, digest_of, xxh3_sums

_limited = LimitedLogger(logging.getLogger(__name__))

ENV = "KVFETCH_GPU_ANS"  # 0 disables it
NUM_STREAMS = 4  # of launches
_ALIGNMENT = 16  # of bitstreams and frames, in bytes


@dataclass(eq=False)
class _Launched:
    """Bitstreams that one launch decodes. ``status`` and ``sums`` are on the host, and right once ``done``."""

    frames: list[torch.Tensor]
    status: torch.Tensor
    sums: torch.Tensor
    done: Event
    kept: torch.Tensor  # pinned memory that is being uploaded
    stream: Stream | None  # until a thread has seen that it is done


@dataclass(eq=False)
class _Request:
    bitstream: bytes | memoryview
    shape: PictureShape
    num_integers: int
    launched: _Launched | Exception | None = None
    index: int = 0  # in what was launched

    @property
    def num_bytes(self) -> int:
        num_frames, height, width = self.shape
        return num_frames * PLANES * height * width


class GpuAnsDecoder(FrameDecoder):
    """Decodes `ans` for all sessions of a process. Thread-safe.

    One thread at a time launches all that wait, on any stream that has finished: meanwhile bitstreams gather. SGLang
    gives streams few connections to the device (``CUDA_DEVICE_MAX_CONNECTIONS``), so one of ours may share a
    connection with restores that wait for a forward pass, and wait with them. Others go on. Frames of a launch share
    memory, which is freed with the last of them.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._codec = AnsCodec()
        self._launching = Lock()  # held while waiting for a stream
        self._freed = Condition()  # guards what follows
        self._free = deque(device.new_stream() for _ in range(NUM_STREAMS))  # those that have finished
        self._waiting: list[_Request] = []

    def decode(
        self,
        bitstream: bytes | memoryview,
        shape: PictureShape,
        *,
        with_sum: bool = False,
        to_host: bool = False,
        num_integers: int | None = None,
    ) -> DecodedFrames:
        request = _Request(bitstream, shape, num_integers or 0)
        if not to_host and request.num_integers >= MIN_BYTES and max(request.num_bytes, len(bitstream)) <= MAX_BYTES:
            try:
                return self._decode(request)
            except torch.OutOfMemoryError as e:
                _limited.warning("ans", f"ans is decoded on the CPU: {brief(e)}")
        frames = self._codec.decode(bitstream, shape)
        return DecodedFrames(frames, frames)

    def _decode(self, request: _Request) -> DecodedFrames:
        with self._freed:
            self._waiting.append(request)
        with self._launching:
            if request.launched is None:
                self._launch_waiting()
        launched = request.launched
        assert launched is not None
        if isinstance(launched, Exception):
            raise launched
        try:
            launched.done.synchronize()
        finally:
            with self._freed:
                if launched.stream is not None:  # no other thread of this launch was here before
                    self._free_again(launched.stream)
                    launched.stream = None
        if launched.status[request.index]:
            raise CorruptError("ans bitstream does not decode on the GPU")
        digest = digest_of(launched.sums[request.index].tolist(), request.num_integers)
        return DecodedFrames(launched.frames[request.index], None, digest=digest)

    def _launch_waiting(self) -> None:
        with self._freed:
            self._freed.wait_for(lambda: self._free)
            stream = self._free.popleft()
            requests, self._waiting = self._waiting, []
        launched: _Launched | Exception
        try:
            launched = self._launch(requests, stream)
        except Exception as e:
            launched = e
            with self._freed:
                self._free_again(stream)
        for index, request in enumerate(requests):
            request.launched, request.index = launched, index

    def _free_again(self, stream: Stream) -> None:
        self._free.append(stream)
        self._freed.notify()

    def _launch(self, requests: Sequence[_Request], stream: Stream) -> _Launched:
        chunks, start, out_start = [], 0, 0
        for request in requests:
            num_frames, height, width = request.shape
            chunks.append(AnsChunk(start, len(request.bitstream), num_frames, height * width, out_start))
            start += _aligned(len(request.bitstream))
            out_start += _aligned(request.num_bytes)
        host = self._device.pinned(start)
        for chunk, request in zip(chunks, requests, strict=True):
            host.numpy()[chunk.start : chunk.start + chunk.size] = np.frombuffer(request.bitstream, np.uint8)
        data, out = (self._device.empty((size,), stream) for size in (start, out_start))
        status = self._device.pinned(4 * len(requests)).view(torch.int32)
        sums = self._device.pinned(8 * SUMS * len(requests)).view(torch.int64).view(-1, SUMS)
        ranges = [(chunk.out_start, request.num_integers) for chunk, request in zip(chunks, requests, strict=True)]

        def work() -> None:
            data.copy_(host, non_blocking=True)
            status.copy_(ans_decode(data, chunks, out), non_blocking=True)
            sums.copy_(xxh3_sums(out, ranges), non_blocking=True)

        self._device.launch(stream, work)
        frames = [
            out[chunk.out_start : chunk.out_start + chunk.num_bytes].view(request.shape[0], PLANES, *request.shape[1:])
            for chunk, request in zip(chunks, requests, strict=True)
        ]
        return _Launched(frames, status, sums, self._device.mark(stream), host, stream)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def open_gpu_ans(device: Device) -> tuple[GpuAnsDecoder | None, str]:
    """Open the decoder, if it passes a bit-exact trial, which also compiles its kernels. Return it, or None, and a
    sentence about the result. Raises nothing."""
    if os.environ.get(ENV) == "0":
        return None, f"ans is decoded on the CPU: {ENV}=0 is set"
    decoder = GpuAnsDecoder(device)
    try:
        fault = _trial(decoder, device)
    except Exception as e:  # a compiler and a driver fail in many ways
        fault = f"a trial failed: {brief(e)}"
    if fault:
        return None, f"ans is decoded on the CPU: {fault}"
    return decoder, "ans is decoded on the GPU, too, while the CPU is busy"


def _trial(decoder: GpuAnsDecoder, device: Device) -> str:
    """Decode rows of all widths, with escaped integers. Return what is wrong; an empty string if nothing is."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.logspace(2, -1, 12).view(4, 3, 1, 1)
    frames = (128 + widths * torch.randn((4, 3, 1, 72), generator=generator)).round().clamp(0, 255).to(torch.uint8)
    found = decoder.decode(AnsCodec().encode(frames), (4, 1, 72), num_integers=frames.numel())
    if not torch.equal(found.frames.to("cpu"), frames):
        return "a trial gave other integers"
    return "" if found.digest == xxhash.xxh3_128_digest(frames.numpy().data) else "a trial gave another checksum"
