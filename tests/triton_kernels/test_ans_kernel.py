"""The kernel that decodes `ans`, beside the native coder, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.errors import CorruptError
from sgl_kvfetch.triton_kernels import ans, runtime
from sgl_kvfetch.triton_kernels.ans import ALIGNMENT, AnsChunk, ans_decode, ans_decode_reference, try_gpu_ans
from sgl_kvfetch.triton_kernels.xxh3 import xxh3_sums
from tests.codec.bitstream.test_ans import coefficients
from tests.plugin.device.fake_streams import FakeDevice
from tests.triton_kernels.cases import DEVICE, poisoned

pytestmark = pytest.mark.slow

CODEC = AnsCodec()
MARGIN = 12  # bytes between the parts of the output, which nobody may write to


def joined(bitstreams: Sequence[bytes], shapes: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, list[AnsChunk]]:
    """Return bitstreams one behind the other, and the chunks. What lies between them would be valid words.

    ``shapes``: frames and tokens of each.
    """
    data, chunks, out_start = bytearray(), [], MARGIN
    for bitstream, (num_frames, tokens) in zip(bitstreams, shapes, strict=True):
        chunks.append(AnsChunk(len(data), len(bitstream), num_frames, tokens, out_start))
        data += bitstream + b"\x5a" * (-len(bitstream) % ALIGNMENT + ALIGNMENT)
        out_start += chunks[-1].num_bytes + MARGIN
    return torch.frombuffer(data, dtype=torch.uint8).to(DEVICE), chunks


def decoded(data: torch.Tensor, chunks: Sequence[AnsChunk]) -> tuple[list[int], list[torch.Tensor]]:
    """Return each chunk's status and integers, after checking that nothing else was written."""
    out = poisoned(chunks[-1].out_start + chunks[-1].num_bytes + MARGIN, dtype=torch.uint8)
    status = ans_decode(data, chunks, out)
    assert (status.dtype, status.shape, status.device) == (torch.int32, (len(chunks),), data.device)
    found = [out[c.out_start : c.out_start + c.num_bytes].clone() for c in chunks]
    for chunk in chunks:
        out[chunk.out_start : chunk.out_start + chunk.num_bytes] = 0xAB
    assert bool((out == 0xAB).all())
    return status.tolist(), found


def test_the_native_coders_bits_at_any_number_of_tokens() -> None:
    """Chunks of different shapes in one launch. Also integers that no model expects: noise, in which most are escaped
    in narrow rows and classes jump, and the extremes."""
    every = [coefficients(3, tokens) for tokens in (1, 5, 31, 32, 33, 63, 64, 200)]
    every += [coefficients(6, 33), coefficients(33, 9)]
    assert sum(int((x == 0).sum()) for x in every)  # in narrow rows no distribution has 0
    noise = torch.randint(0, 256, (3, 3, 1, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    noise[::2] = 128
    noise[0, 1, 0, 3:9] = 255
    every += [noise, *(torch.full((1, 3, 1, 33), value, dtype=torch.uint8) for value in (0, 128, 255))]
    data, chunks = joined([CODEC.encode(x) for x in every], [(len(x), x.shape[3]) for x in every])
    status, found = decoded(data, chunks)
    assert status == [0] * len(every)
    assert all(torch.equal(x, y.view(-1).to(DEVICE)) for x, y in zip(found, every, strict=True))
    assert not ans_decode_reference(data, chunks, poisoned(1 << 15, dtype=torch.uint8)).any()


def native_verdict(bitstream: bytes, chunk: AnsChunk) -> torch.Tensor | None:
    try:
        return CODEC.decode(bitstream, (chunk.num_frames, 1, chunk.tokens)).view(-1)
    except CorruptError:
        return None


@pytest.mark.slow
def test_broken_bitstreams_are_broken_for_both_and_touch_nothing_else() -> None:
    """Cut, lengthened, and with changed bytes; sound ones lie between them."""
    random = np.random.default_rng(3)
    bitstreams, shapes = [], []
    for tokens in (2, 33):
        frames = coefficients(3, tokens, seed=5)
        sound = CODEC.encode(frames)
        broken = [sound[:size] for size in {0, 1, 4, 4 * min(tokens, 32) - 1, len(sound) // 2, len(sound) - 1}]
        broken += [sound + b"\0", sound + b"\0\0", bytes(4) + sound[4:]]
        for _ in range(5):
            bad = np.frombuffer(sound, np.uint8).copy()
            bad[random.integers(0, len(bad), 2)] ^= random.integers(1, 256, 2).astype(np.uint8)
            broken.append(bad.tobytes())
        broken.append(random.bytes(300))
        bitstreams += [sound, *broken, sound]
        shapes += [(len(frames), tokens)] * (len(broken) + 2)
    data, chunks = joined(bitstreams, shapes)
    status, found = decoded(data, chunks)
    verdicts = [native_verdict(x, chunk) for x, chunk in zip(bitstreams, chunks, strict=True)]
    assert status == [int(verdict is None) for verdict in verdicts]
    assert sum(status) > 20
    for verdict, integers in zip(verdicts, found, strict=True):
        assert verdict is None or torch.equal(integers, verdict.to(DEVICE))
    assert ans_decode_reference(data, chunks, poisoned(1 << 15, dtype=torch.uint8)).tolist() == status


DATA, OUT = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("data", "out", "chunk", "message"),
    [
        (DATA.to(torch.int8), OUT, (0, 64, 1, 4, 0), "data is torch.int8"),
        (DATA, OUT.to(torch.int8), (0, 64, 1, 4, 0), "out is torch.int8"),
        (DATA.repeat(2)[::2], OUT, (0, 64, 1, 4, 0), "contiguous"),
        (DATA[:63], OUT, (0, 63, 1, 4, 0), "multiple of 4"),
        *((DATA, OUT, chunk, "exceeds 64 bytes") for chunk in ((2, 40, 1, 4, 0), (4, 64, 1, 4, 0), (0, 64, 0, 4, 0))),
        *((DATA, OUT, chunk, "64 of output") for chunk in ((0, 64, 1, 22, 0), (0, 64, 1, 4, -1))),
    ],
)
def test_other_arguments_are_refused(
    data: torch.Tensor, out: torch.Tensor, chunk: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ans_decode(data, [AnsChunk(*chunk)], out)


def test_a_trial_decides_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "INTERPRETED", False)  # the kernels' references run
    assert try_gpu_ans(FakeDevice()) == (True, "ans is decoded on the GPU")
    for name, wrong, message in (
        ("ans_decode", lambda *args: ans_decode(*args) + 0 * args[2].fill_(3).max(), "a trial gave other integers"),
        ("ans_decode", lambda *args: ans_decode(*args) + 1, "a trial's bitstream does not decode"),
        ("xxh3_sums", lambda *args: xxh3_sums(*args) + 1, "a trial gave another checksum"),
        ("xxh3_sums", lambda *args: 1 // 0, "a trial failed: ZeroDivisionError: integer division or modulo by zero"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(ans, name, wrong)
            assert try_gpu_ans(FakeDevice()) == (False, f"ans is decoded on the CPU: {message}")
    monkeypatch.setenv("KVFETCH_GPU", "0")
    assert try_gpu_ans(FakeDevice()) == (False, "ans is decoded on the CPU: KVFETCH_GPU=0 is set")
