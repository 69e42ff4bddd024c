"""The benchmarks of the codec: a small run each, and that their figures are what they are said to be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from benchmarks.codec import speed
from benchmarks.codec.__main__ import main
from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.measure import measure
from benchmarks.codec.method import KVShape, Method
from benchmarks.codec.segments import PAGE_TOKENS, SegmentMethod
from harness.models import make_tiny_mellum
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.quant.registry import make_quantiser
from tests.benchmarks.codec.kv import make_kv
from tests.benchmarks.conftest import Run
from tests.codec.quant.profiles import make_profile

CONTEXT, CONTINUATION = 64, 20


def test_codec(run: Run, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    profile = tmp_path / "tiny.profile"
    make_profile(num_layers=4, num_heads=2, head_dim=64, cell_heads=2, num_sinks=1).save(profile)
    args = ["--model", tiny_llama, "--text", text, "--windows", 2, "--context", 128, "--continuation", 16]
    names = "exact/zstd,cachegen-16/2048,kivi-*,klt-0.001/ans,klt/levels-*"
    rows = {row["name"]: row for row in run(main, *args, "--methods", names, "--profile", profile)["rows"]}
    levels = [f"klt/levels-{count}" for count in (1, 2, 3)]
    assert set(rows) == {"exact/zstd", "cachegen-16/2048", "kivi-4", "kivi-2", "klt-0.001/ans", *levels}
    for row in rows.values():
        assert row["ratio"] == pytest.approx(16 / row["bits_per_value"])
        for figure in ("bits", "kl", "dnll", "top1"):
            low, high = row[f"{figure}_ci"]
            assert low <= row["bits_per_value" if figure == "bits" else figure] <= high
        assert min(row["encode_mb_s"], row["decode_mb_s"]) > 0
        assert [
            sum(point[f] for point in row["samples"]) / 2 for f in ("bits_per_value", "kl", "top1")
        ] == pytest.approx([row["bits_per_value"], row["kl"], row["top1"]])
    assert rows["exact/zstd"]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows["kivi-2"]["kl"] > rows["kivi-4"]["kl"] > 0
    bits, kls = ([rows[name][figure] for name in levels] for figure in ("bits_per_value", "kl"))
    assert sorted(bits) == bits
    assert kls[0] > kls[2]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_speed(run: Run, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    profile = tmp_path / "tiny.profile"
    make_profile(num_layers=4, num_heads=2, head_dim=64, cell_heads=2).save(profile)
    args = ["--model", tiny_llama, "--text", text, "--profile", profile, "--context", 128]
    rows = run(speed.main, *args, "--rounds", 1)["rows"]
    assert {row["codec"] for row in rows} == {"ans", "ans, portable", "zstd", "hevc"}
    for row in rows:
        assert row["restore_mb_s"] < row["decode_mb_s"]
        assert row["quantise_mb_s"] < row["encode_mb_s"]


class _Noisy(Method):
    """Exact values in 3 bytes each, with noise on what comes back."""

    name, family = "noisy", "noisy"

    def encode(self, k: torch.Tensor, v: torch.Tensor) -> Sequence[bytes]:
        self.values = (k, v)
        return [bytes(3 * k.numel()), bytes(3 * v.numel())]

    def decode(self, parts: Sequence[bytes], shape: KVShape) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        k, v = ((x.float() + 0.3 * torch.randn(x.shape)).bfloat16() for x in self.values)
        return k, v


def test_figures_are_those_of_the_whole_model(tiny_llama: Path) -> None:
    """Against a forward pass over the whole window, without a cache, for the reference; and by hand for the rest."""
    torch.manual_seed(5)
    model, method = KVModel(str(tiny_llama)), _Noisy()
    windows = [torch.randint(3, 2048, (CONTEXT + CONTINUATION + 1,)) for _ in range(2)]
    measured = measure(model, windows, CONTEXT, [method])
    (row,) = measured.rows
    assert (row.bits_per_value.mean, row.bits_per_value.margin) == (24, 0)
    nlls, kls, changes = [], [], []
    for ids in windows:
        with torch.no_grad():
            logits = model.model(ids[None]).logits[0, CONTEXT:-1]
        p = torch.log_softmax(logits.double(), -1)
        nlls.append(float(-p.gather(1, ids[CONTEXT + 1 :, None]).mean()))
        coded = method.code(*(x.bfloat16() for x in model.kv(ids[:CONTEXT])))
        q = model.log_probabilities(coded.k, coded.v, ids[CONTEXT:-1]).double()
        kls.append(float(torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")))
        changes.append(float(-q.gather(1, ids[CONTEXT + 1 :, None]).mean()) - nlls[-1])
    # The reference is of bfloat16 KV, the forward pass of float32.
    assert measured.nll.mean == pytest.approx(sum(nlls) / 2, rel=0.01)
    assert row.kl.mean == pytest.approx(sum(kls) / 2, rel=0.1)
    assert row.dnll.mean == pytest.approx(sum(changes) / 2, abs=0.05)


def test_sliding_windows_keep_the_whole_context(tmp_path: Path) -> None:
    """As SGLang's pool of a model with one pool does: the model's own cache keeps the last 16 tokens."""
    model = KVModel(str(make_tiny_mellum(tmp_path, window=16)))
    ids = torch.randint(3, 2048, (60,), generator=torch.Generator().manual_seed(0))
    k, v = model.kv(ids[:40])
    assert len(k) == len(v) == 40
    with torch.no_grad():
        expected = torch.log_softmax(model.model(ids[None]).logits[0, 40:].float(), -1)
        torch.testing.assert_close(model.log_probabilities(k, v, ids[40:]), expected, rtol=1e-3, atol=1e-3)


def test_all_that_a_writer_would_store_is_counted() -> None:
    k, v = make_kv(3 * PAGE_TOKENS)
    method = SegmentMethod("exact/zstd", "", make_quantiser("exact"), "zstd")
    parts = method.encode(k, v)
    for manifest, data in zip(map(decode_manifest, parts[::2]), parts[1::2], strict=True):
        assert manifest.variants[0].size_bytes == len(data)
    coded = method.code(k, v)
    assert coded.num_bytes == sum(map(len, parts))
    assert torch.equal(coded.k, k)
    assert torch.equal(coded.v, v)
