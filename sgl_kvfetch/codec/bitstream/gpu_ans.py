"""Find out whether a GPU decodes `ans`, and verifies it by the manifest's checksum, as the CPU does."""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.codec.cuda_streams import Device, why_no_gpu
from sgl_kvfetch.log import brief
from sgl_kvfetch.triton_kernels.ans import ALIGNMENT, AnsChunk, ans_decode
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digest_of, xxh3_sums


def try_gpu_ans(device: Device) -> tuple[bool, str]:
    """Return whether the kernels pass a bit-exact trial, which also compiles them, and a sentence about the result.
    Raises nothing."""
    try:
        fault = why_no_gpu() or _trial(device)
    except Exception as e:  # a compiler and a driver fail in many ways
        fault = f"a trial failed: {brief(e)}"
    if fault:
        return False, f"ans is decoded on the CPU: {fault}"
    return True, "ans is decoded on the GPU"


def _trial(device: Device) -> str:
    """Decode rows of all widths, with escaped integers. Return what is wrong; an empty string if nothing is."""
    generator = torch.Generator().manual_seed(0)
    widths = torch.logspace(2, -1, 12).view(4, 3, 1, 1)
    frames = (128 + widths * torch.randn((4, 3, 1, 72), generator=generator)).round().clamp(0, 255).to(torch.uint8)
    bitstream, num_bytes = AnsCodec().encode(frames), frames.numel()
    coded = device.pinned(-(-len(bitstream) // ALIGNMENT) * ALIGNMENT)
    coded.numpy()[: len(bitstream)] = np.frombuffer(bitstream, np.uint8)
    stream = device.new_stream()
    data, out = (device.empty((size,), stream) for size in (len(coded), num_bytes))
    status = device.pinned(4).view(torch.int32)
    sums = device.pinned(8 * SUMS).view(torch.int64)
    found = device.pinned(num_bytes)

    def work() -> None:
        data.copy_(coded, non_blocking=True)
        status.copy_(ans_decode(data, [AnsChunk(0, len(bitstream), 4, 72, 0)], out), non_blocking=True)
        sums.copy_(xxh3_sums(out, [(0, num_bytes)])[0], non_blocking=True)
        found.copy_(out, non_blocking=True)

    device.launch(stream, work)
    device.mark(stream).synchronize()
    if status.item():
        return "a trial's bitstream does not decode"
    if not torch.equal(found, frames.flatten()):
        return "a trial gave other integers"
    is_right = digest_of(sums.tolist(), num_bytes) == xxhash.xxh3_128_digest(frames.numpy().data)
    return "" if is_right else "a trial gave another checksum"
