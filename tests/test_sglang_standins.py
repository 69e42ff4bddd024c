"""Stand-ins for `sgl_kernel`: what they compute, and what a server's process sees of them."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from harness import sglang_standins
from harness.sglang_standins import finder, jit_kernels, kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU's kernels run in Triton's interpreter


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def test_rows_are_stored_but_for_those_that_are_skipped() -> None:
    k, v, slots = numbers(3, 2, 8), numbers(3, 2, 12), torch.tensor([4, -1, 0], device=DEVICE)
    k_cache, v_cache = torch.zeros(6, 2, 8, device=DEVICE), torch.zeros(6, 2, 12, device=DEVICE)
    kernels.store_rows(k, v, k_cache, v_cache, slots, -1)
    for x, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(cache[[4, 0]], x[[0, 2]])
        assert not cache[[1, 2, 3, 5]].any()


@dataclass(frozen=True)
class Model:
    """The sizes of a model that gpu_check serves."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    dim: int

    def projections(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of some tokens, ``(tokens, heads, dim)``, as one matrix has computed them."""
        sizes = [n * self.dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = numbers(TOKENS, sum(sizes), dtype=BFLOAT16).split(sizes, dim=1)
        q, k, v = (x.unflatten(1, (-1, self.dim)) for x in (q, k, v))
        return q, k, v


BFLOAT16, TOKENS = torch.bfloat16, 3
MODELS = Model(256, 512, 4, 2, 64), Model(4096, 14336, 32, 8, 128)  # a small Llama, and Llama-3.1-8B


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Return float32 in bfloat16, as a kernel stores it: Triton's interpreter truncates."""
    return (x if x.is_cuda else (x.view(torch.int32) & -65536).view(torch.float32)).to(BFLOAT16)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare with what PyTorch computes in float32: sums in another order tip few roundings."""
    torch.testing.assert_close(found, rounded(expected), rtol=2.0**-7, atol=1e-5)
    assert float((found != rounded(expected)).float().mean()) < 0.01


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_stand_ins_are_pytorchs_own_forms_for_the_models_that_are_served(model: Model) -> None:
    """In bfloat16, with Q, K and V that are views of one projection."""
    x, residual = numbers(TOKENS, model.hidden, dtype=BFLOAT16), numbers(TOKENS, model.hidden, dtype=BFLOAT16) + 1
    weight, size, functional = numbers(model.hidden, dtype=BFLOAT16), (model.hidden,), torch.nn.functional
    assert_rounded(kernels.rmsnorm(x, weight, 1e-5), functional.rms_norm(x.float(), size, weight.float(), 1e-5))
    added = residual.float() + x.float()
    kernels.fused_add_rmsnorm(x, residual, weight, 1e-5)
    assert torch.equal(residual, rounded(added))
    assert_rounded(x, functional.rms_norm(added, size, weight.float(), 1e-5))
    gate, up = (both := numbers(TOKENS, 2 * model.intermediate, dtype=BFLOAT16)).float().chunk(2, dim=1)
    assert_rounded(kernels.silu_and_mul(both), functional.silu(gate) * up)

    angles = torch.arange(40.0)[:, None] * 500000.0 ** (-torch.arange(0, model.dim, 2) / model.dim)
    cache, positions = torch.cat((angles.cos(), angles.sin()), dim=1).to(DEVICE), torch.tensor([0, 17, 39]).to(DEVICE)
    q, k, v = model.projections()
    cos, sin = cache[positions, None].chunk(2, dim=-1)
    expected = []
    for each in (q, k):
        a, b = each.float().chunk(2, dim=-1)
        expected.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
    slots = torch.tensor([7, 0, 3], device=DEVICE)
    caches = [torch.zeros(9, model.kv_heads, model.dim, dtype=BFLOAT16, device=DEVICE) for _ in range(2)]
    values = v.clone()
    k_cache, v_cache = caches
    rope = jit_kernels.load("fused_rope", f"true, {model.dim}")
    rope.run_rope_store(q, k, v, k_cache, v_cache, cache, positions, slots)
    for found, wanted in zip((q, k), expected, strict=True):
        assert_rounded(found, wanted)
    assert torch.equal(caches[0][slots], k)
    assert torch.equal(caches[1][slots], values)
    assert torch.equal(v, values)
    assert not caches[0][[1, 2, 4, 5, 6, 8]].any()


def test_a_kernel_without_a_stand_in_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("STANDIN_LOG", str(tmp_path / "log"))
    with pytest.raises(jit_kernels.NoStandInError, match="compiled kernel moe has no stand-in"):
        jit_kernels.load("moe")
    with pytest.raises(RuntimeError, match=r"sgl_kernel\.topk has no stand-in"):
        finder.Missing("sgl_kernel.topk")()
    said = (tmp_path / "log").read_text()
    assert "compiled kernel moe (): NONE" in said
    assert "CALLED sgl_kernel.topk" in said


_IN_A_SERVER = """
import sys
import sgl_kernel, sgl_kernel.utils
from sgl_kernel.elementwise import whatever
assert sgl_kernel.rmsnorm.__module__ == "sglang_standins.kernels"
assert not sgl_kernel.utils.is_arch_support_pdl()
try:
    whatever(1)
except RuntimeError as e:
    assert str(e) == "sgl_kernel.elementwise.whatever has no stand-in"
else:
    raise AssertionError
assert "harness" not in sys.modules
from sglang.srt.mem_cache.cpp_utils import native_hash
print(*native_hash._load_native_hash_module().get_hash(range(8), 8, 1, False, None, 4))
"""


@pytest.mark.sglang
def test_what_a_server_imports(tmp_path: Path) -> None:
    """SGLang's page hash, too, which it would compile."""
    env = sglang_standins.lay_out(tmp_path, tmp_path / "log")
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_SERVER], cwd=tmp_path, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    first = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in range(4)))
    second = hashlib.sha256(first.digest() + b"".join(i.to_bytes(4, "little") for i in range(4, 8)))
    assert done.stdout.split() == [first.hexdigest(), second.hexdigest()]
    assert "made module sgl_kernel.elementwise" in (tmp_path / "log").read_text()
