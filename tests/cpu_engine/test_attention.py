"""New tokens attend to a prefix as in SGLang's `torch_native` backend, in each form in which SGLang calls it."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from sglang_on_cpu.attention import attend_to_prefix


def sglang_attention() -> Callable[..., torch.Tensor]:
    """Return ``TorchNativeAttnBackend._run_sdpa_forward_extend`` as SGLang has it, whatever hooks are installed."""
    spec = importlib.util.find_spec("sglang.srt.layers.attention.torch_native_backend")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    backend = fresh.TorchNativeAttnBackend
    return partial(backend._run_sdpa_forward_extend, backend)  # of `self`, it uses only a static method


@dataclass(frozen=True)
class AttentionForm:
    """One way in which SGLang calls the function. ``dim``: of Q and K. ``sequences``: for each, how many tokens are in
    the KV cache, and how many are new."""

    name: str
    heads: int
    kv_heads: int
    dim: int
    dim_v: int
    sequences: tuple[tuple[int, int], ...]
    window: int | None = None
    encoder_tokens: int | None = None
    is_causal: bool = True
    is_cross_attention: bool = False

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of the function, with random values, scattered slots, and NaN in the unused ones."""
        generator = torch.Generator().manual_seed(0)
        encoder = self.encoder_tokens or 0
        totals = [before + new for before, new in self.sequences]
        ends = [0, *itertools.accumulate(encoder + total for total in totals)]
        num_slots = 2 * ends[-1]
        slots = torch.randperm(num_slots, generator=generator)[: ends[-1]]
        req_to_token = torch.zeros(len(totals) + 1, max(totals) + encoder, dtype=torch.int32)
        for row, (start, end) in enumerate(itertools.pairwise(ends), 1):
            req_to_token[row, : end - start] = slots[start:end]
        k_cache, v_cache = (
            torch.full((num_slots, self.kv_heads, dim), torch.nan, dtype=dtype) for dim in (self.dim, self.dim_v)
        )
        for cache in (k_cache, v_cache):
            cache[slots] = torch.randn(cache[slots].shape, generator=generator).to(dtype)
        num_new = sum(new for _, new in self.sequences)
        return {
            "query": torch.randn(num_new, self.heads, self.dim, generator=generator).to(dtype),
            "output": torch.full((num_new, self.heads, self.dim_v), torch.nan, dtype=dtype),
            "k_cache": k_cache,
            "v_cache": v_cache,
            "req_to_token": req_to_token,
            "req_pool_indices": torch.arange(1, len(totals) + 1),
            "seq_lens": torch.tensor(totals),
            "extend_prefix_lens": torch.tensor([before for before, _ in self.sequences]),
            "extend_seq_lens": torch.tensor([new for _, new in self.sequences]),
            "encoder_lens": None if self.encoder_tokens is None else torch.full((len(totals),), encoder),
            "scaling": self.dim**-0.5,
            "enable_gqa": self.heads != self.kv_heads,
            "causal": self.is_causal,
            "is_cross_attn": self.is_cross_attention,
            "sliding_window_size": self.window,
        }


FORMS = (
    AttentionForm("grouped queries", 9, 3, 64, 64, ((640, 16),)),
    AttentionForm("no prefix", 9, 3, 64, 64, ((0, 100),)),
    AttentionForm("a chunk behind a prefix", 4, 2, 64, 64, ((300, 900),)),
    AttentionForm("several sequences", 4, 2, 64, 64, ((64, 7), (0, 40), (1030, 24), (5, 1))),
    AttentionForm("sliding window", 4, 2, 64, 64, ((1500, 20), (0, 60), (300, 700)), window=100),
    AttentionForm("a window of one token", 4, 2, 64, 64, ((520, 10),), window=0),
    AttentionForm("MLA", 4, 1, 144, 128, ((600, 20), (0, 30))),
    AttentionForm("V of another size, with a window", 4, 1, 96, 64, ((700, 12),), window=64),
    AttentionForm("an encoder's tokens in front", 4, 2, 64, 64, ((60, 12), (0, 40)), encoder_tokens=30),
    AttentionForm(
        "cross attention", 4, 2, 64, 64, ((0, 40), (0, 24)), None, 30, is_causal=False, is_cross_attention=True
    ),
    AttentionForm("an encoder", 4, 4, 64, 64, ((0, 40),), is_causal=False),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_new_tokens_attend_as_in_sglang(form: AttentionForm, dtype: torch.dtype) -> None:
    found = attend_to_prefix(None, **form.arguments(dtype))
    expected = sglang_attention()(**form.arguments(dtype))
    # Where bits are equal depends on the processor.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
