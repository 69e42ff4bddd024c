"""The trial of `ans` on a GPU, with a fake device."""

from __future__ import annotations

import pytest

from sgl_kvfetch.triton_kernels import ans, runtime
from sgl_kvfetch.triton_kernels.ans import ans_decode, try_gpu_ans
from sgl_kvfetch.triton_kernels.xxh3 import xxh3_sums
from tests.plugin.device.fake_streams import FakeDevice


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
