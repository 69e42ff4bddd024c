"""Checks the kernels that decode and verify `ans` against the CPU, and measures how many integers they take."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import xxhash

from benchmarks.gpu_check.record import Record
from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.triton_kernels.ans import ALIGNMENT, AnsChunk, ans_decode
from sgl_kvfetch.triton_kernels.xxh3 import digest_of, xxh3_sums

_DIFFERENT = 4  # bitstreams; larger numbers repeat them
_REPEATS = 5


class Rows(NamedTuple):
    """Bitstreams of equal shape. ``num_frames`` has three rows each."""

    num_chunks: int
    num_frames: int
    tokens: int


CHECKED = Rows(3, 40, 1024), Rows(5, 21, 33), Rows(1, 30, 31), Rows(2, 4, 1000)
# Cells of a model like Llama-3.1-8B: one, as many as an H100 has multiprocessors, and those of 32,768 tokens.
MEASURED = Rows(1, 372, 1024), Rows(132, 372, 1024), Rows(1408, 372, 1024)


def run(record: Record) -> None:
    device = torch.device("cuda", 0)
    check(record, device, CHECKED)
    measure(record, device, MEASURED)


def check(record: Record, device: torch.device, every: Sequence[Rows]) -> None:
    for rows in every:
        frames, data, chunks = _bitstreams(rows, device)
        out = torch.full((rows.num_chunks * frames[0].numel(),), 0xAB, dtype=torch.uint8, device=device)
        sound = ans_decode(data, chunks, out).tolist() == [0] * rows.num_chunks
        expected = torch.cat([frames[i % len(frames)].view(-1) for i in range(rows.num_chunks)])
        is_right = sound and torch.equal(out.cpu(), expected)
        num_bytes = frames[0].numel() - 5
        ranges = [(chunk.out_start // 8 * 8, num_bytes) for chunk in chunks]
        is_verified = all(
            digest_of(sums, size) == xxhash.xxh3_128_digest(expected[start : start + size].numpy().data)
            for (start, size), sums in zip(ranges, xxh3_sums(_whole_words(out), ranges).tolist(), strict=True)
        )
        first = chunks[0]._replace(size=chunks[0].size - 1)
        is_refused = ans_decode(data, [first], out).tolist() == [1]
        found = {"bits": is_right, "checksum": is_verified, "cut": is_refused}
        wrong = ", ".join(name for name, is_good in found.items() if not is_good)
        record.row("ans: bits", at=str(rows), found=f"wrong: {wrong}" if wrong else "as the CPU's")
        if wrong:
            record.fail(f"ans, {rows}: wrong {wrong}")


def measure(record: Record, device: torch.device, every: Sequence[Rows]) -> None:
    for rows in every:
        frames, data, chunks = _bitstreams(rows, device)
        num_bytes = frames[0].numel()
        out = torch.empty(rows.num_chunks * num_bytes, dtype=torch.uint8, device=device)
        ranges = [(chunk.out_start, num_bytes) for chunk in chunks]
        decode_s = _seconds_of(lambda data=data, chunks=chunks, out=out: ans_decode(data, chunks, out), device)  # type: ignore[misc]
        verify_s = _seconds_of(lambda out=out, ranges=ranges: xxh3_sums(out, ranges), device)  # type: ignore[misc]
        record.row(
            "ans: speed",
            bitstreams=rows.num_chunks,
            bits_an_integer=8 * chunks[0].size / num_bytes,
            decode_ms=1e3 * decode_s,
            integers_gb_a_second=out.numel() / decode_s / 1e9,
            checksum_ms=1e3 * verify_s,
        )


def _bitstreams(rows: Rows, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor, list[AnsChunk]]:
    """Return frames, their bitstreams one behind the other on the device, and the chunks of all bitstreams."""
    random = np.random.default_rng(0)
    frames, chunks, data = [], [], bytearray()
    for _ in range(min(_DIFFERENT, rows.num_chunks)):
        widths = np.geomspace(10, 0.2, 3 * rows.num_frames)[:, None] * random.lognormal(0, 0.3, rows.tokens)
        values = np.clip(np.round(random.normal(0, widths)) + 128, 0, 255).astype(np.uint8)
        frames.append(torch.from_numpy(values).view(rows.num_frames, 3, 1, rows.tokens))
        bitstream = AnsCodec().encode(frames[-1])
        chunks.append(AnsChunk(len(data), len(bitstream), rows.num_frames, rows.tokens, 0))
        data += bitstream + bytes(_aligned(len(bitstream)) - len(bitstream))
    size = frames[0].numel()
    repeated = [chunks[i % len(chunks)]._replace(out_start=i * size) for i in range(rows.num_chunks)]
    return frames, torch.frombuffer(data, dtype=torch.uint8).to(device), repeated


def _aligned(size: int) -> int:
    return size + int(-size % ALIGNMENT)


def _whole_words(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % 8)])


def _seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a launch. It takes milliseconds, so the host keeps ahead of the device."""
    work()
    synchronize: Callable[[], object] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    started_s = time.perf_counter()
    for _ in range(_REPEATS):
        work()
    synchronize()
    return (time.perf_counter() - started_s) / _REPEATS
