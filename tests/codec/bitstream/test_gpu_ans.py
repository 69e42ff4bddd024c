"""Tests of the decoder of `ans` on a GPU, with a fake device. The kernels' own tests are in tests/triton_kernels."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import xxhash

from harness.waiting import polls, wait_until
from sgl_kvfetch.codec.bitstream import gpu_ans
from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.codec.bitstream.base import DecodedFrames
from sgl_kvfetch.codec.bitstream.gpu_ans import NUM_STREAMS, GpuAnsDecoder, open_gpu_ans
from sgl_kvfetch.codec.cuda_streams import Stream
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.layout.regions import region_layout
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import ans_decode
from sgl_kvfetch.triton_kernels.xxh3 import xxh3_sums
from tests.codec.bitstream.test_ans import coefficients
from tests.plugin.device.fake_streams import FakeDevice, FakeEvent

CODEC = AnsCodec()


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bitstreams in each launch."""
    sizes: list[int] = []

    def counting(data: torch.Tensor, chunks: Any, out: torch.Tensor) -> torch.Tensor:
        sizes.append(len(chunks))
        return ans_decode(data, chunks, out)

    monkeypatch.setattr(gpu_ans, "ans_decode", counting)
    return sizes


def decode(decoder: GpuAnsDecoder, frames: torch.Tensor, num_integers: int | None, **how: bool) -> DecodedFrames:
    shape = len(frames), 1, frames.shape[3]
    return decoder.decode(CODEC.encode(frames), shape, num_integers=num_integers, **how)


def test_frames_stay_there_with_the_checksum_of_their_integers() -> None:
    """There are 40 rows, and two that fill a frame up."""
    frames = coefficients(40, 33)
    found = decode(GpuAnsDecoder(FakeDevice()), frames, 40 * 33)
    assert found.is_on_device
    assert found.host is None
    assert torch.equal(found.frames, frames)
    assert found.digest == xxhash.xxh3_128_digest(frames.numpy().tobytes()[: 40 * 33])


def test_the_cpu_decodes_what_the_gpu_does_not(launches: list[int]) -> None:
    """Frames for the host, integers that do not lie as they are checksummed, and very few."""
    frames = coefficients(40, 33)
    decoder = GpuAnsDecoder(FakeDevice())
    for found in (
        decode(decoder, frames, 40 * 33, to_host=True),
        decode(decoder, frames, None),
        decode(decoder, coefficients(3, 80), 240),
    ):
        assert not found.is_on_device
    assert launches == []


def test_a_broken_bitstream_is_corrupt_and_its_neighbours_are_not() -> None:
    decoder = GpuAnsDecoder(FakeDevice())
    frames = coefficients(40, 33)
    for bad in (b"", CODEC.encode(frames)[:-3]):
        with pytest.raises(CorruptError, match="does not decode on the GPU"):
            decoder.decode(bad, (14, 1, 33), num_integers=40 * 33)
    assert torch.equal(decode(decoder, frames, 40 * 33).frames, frames)


def test_bitstreams_that_wait_share_a_launch(launches: list[int]) -> None:
    """Of many threads, while the first launch is held up: each has its own frames, of its own shape."""
    device, entered, go_on = FakeDevice(), threading.Event(), threading.Event()
    decoder = GpuAnsDecoder(device)
    every = [coefficients(40, tokens, seed=tokens) for tokens in range(20, 32)]
    pinned = device.pinned

    def slow(num_bytes: int) -> torch.Tensor:
        entered.set()
        go_on.wait()
        return pinned(num_bytes)

    device.pinned = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(len(every)) as threads:
        first = threads.submit(decode, decoder, every[0], every[0].numel())
        entered.wait()
        rest = [threads.submit(decode, decoder, x, x.numel()) for x in every[1:]]
        while len(decoder._waiting) < len(rest):
            pass
        go_on.set()
        found = [each.result() for each in (first, *rest)]
    assert sorted(launches) == [1, len(rest)]
    for decoded, frames in zip(found, every, strict=True):
        assert torch.equal(decoded.frames, frames)
        assert decoded.digest == xxhash.xxh3_128_digest(frames.numpy().data)


def test_streams_take_turns() -> None:
    """Each is used again once it has finished."""
    device = FakeDevice()
    decoder = GpuAnsDecoder(device)
    frames = coefficients(40, 33)
    used = {stream.cuda_stream for stream in decoder._free}
    before = {stream.cuda_stream: stream.num_added for stream in device.streams}
    for _ in range(2 * NUM_STREAMS):
        assert torch.equal(decode(decoder, frames, 40 * 33).frames, frames)
    each = {stream.num_added - before[stream.cuda_stream] for stream in device.streams if stream.cuda_stream in used}
    assert len(used) == NUM_STREAMS
    assert len(each) == 1
    assert {stream.cuda_stream for stream in decoder._free} == used


class FewConnections(FakeDevice):
    """Streams share a device's connections, as with ``CUDA_DEVICE_MAX_CONNECTIONS``: what is launched on a stream runs
    after all that was launched before on the streams that share its connection. Threads wait for work that cannot run
    yet."""

    def __init__(self, num_connections: int) -> None:
        self._connections: list[deque[Any]] = [deque() for _ in range(num_connections)]
        super().__init__()

    def new_stream(self) -> Stream:
        stream = super().new_stream()
        self.streams[-1].queue = self._connections[len(self.streams) % len(self._connections)]
        return stream

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        for _ in polls():
            with self.lock:
                while not until() and (ready := [stream for stream in self.streams if stream.can_step]):
                    ready[0].step()
                if until():
                    return


def test_a_restore_that_waits_for_a_forward_pass_holds_up_one_stream_and_not_all() -> None:
    """Streams share connections. A bitstream whose stream shares that of the restore waits; others go on."""
    device = FewConnections(4)
    restores = device.new_stream()
    decoder = GpuAnsDecoder(device)
    forward_is_over = FakeEvent(device)
    restores.wait_event(forward_is_over)
    (held_up,) = [x for x in device.streams if x.queue is device.streams[2].queue and x is not restores]
    frames = coefficients(40, 33)

    def decode_until_held_up() -> DecodedFrames:
        while True:
            found = decode(decoder, frames, 40 * 33)
            if held_up.num_added:
                return found

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(decode_until_held_up)
        wait_until(lambda: bool(held_up.num_added))
        for _ in range(2 * NUM_STREAMS):
            assert torch.equal(decode(decoder, frames, 40 * 33).frames, frames)
        assert not waiting.done()
        forward_is_over.is_done = True
        assert torch.equal(waiting.result(60).frames, frames)


def test_without_memory_the_cpu_decodes_and_other_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    decoder = GpuAnsDecoder(device)
    frames = coefficients(40, 33)

    def no_memory(shape: Any, stream: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(device, "empty", no_memory)
    found = decode(decoder, frames, 40 * 33)
    assert not found.is_on_device
    assert torch.equal(found.frames, frames)

    def fails(shape: Any, stream: Any) -> torch.Tensor:
        raise RuntimeError("a fault")

    monkeypatch.setattr(device, "empty", fails)
    with pytest.raises(RuntimeError, match="a fault"):
        decode(decoder, frames, 40 * 33)


def test_a_trial_decides_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    found, about = open_gpu_ans(FakeDevice())
    assert found is not None
    assert about == "ans is decoded on the GPU, too, while the CPU is busy"
    frames = region_layout(40, 33, FLAT).to_frames(torch.full((40, 33), 128, dtype=torch.uint8))
    assert torch.equal(decode(found, frames, 40 * 33).frames, frames)
    for name, wrong, message in (
        ("ans_decode", lambda *args: ans_decode(*args) + 0 * args[2].fill_(3).max(), "gave other integers"),
        ("ans_decode", lambda *args: ans_decode(*args) + 1, "a trial failed: CorruptError: ans bitstream does not"),
        ("xxh3_sums", lambda *args: xxh3_sums(*args) + 1, "gave another checksum"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(gpu_ans, name, wrong)
            found, about = open_gpu_ans(FakeDevice())
        assert found is None
        assert message in about
    monkeypatch.setenv("KVFETCH_GPU_ANS", "0")
    assert open_gpu_ans(FakeDevice()) == (None, "ans is decoded on the CPU: KVFETCH_GPU_ANS=0 is set")
