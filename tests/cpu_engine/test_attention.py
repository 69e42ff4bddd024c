from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from harness.attention_forms import FORMS, AttentionForm, sglang_attention
from sglang_on_cpu import attention
from sglang_on_cpu.attention import attend_to_prefix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_new_tokens_attend_as_in_sglang(form: AttentionForm, dtype: torch.dtype) -> None:
    found = attend_to_prefix(None, **form.arguments(dtype))
    expected = sglang_attention()(**form.arguments(dtype))
    # Where bits are equal depends on the processor.
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_tokens_behind_a_long_prefix_are_computed_alone() -> None:
    form = AttentionForm("", 2, 1, 8, 8, ((5000, 3),))
    windowed = replace(form, window=10)
    with patch.object(attention, "scaled_dot_product_attention", side_effect=scaled_dot_product_attention) as attend:
        attend_to_prefix(None, **form.arguments(torch.float32))
        attend_to_prefix(None, **windowed.arguments(torch.float32))
    shapes = [(call.args[0].shape[2], call.args[1].shape[2]) for call in attend.call_args_list]
    assert shapes == [(8, 5003), (8, 5003 - 4608)]


def test_a_mask_is_bounded_for_a_long_chunk() -> None:
    form = AttentionForm("", 1, 1, 8, 8, ((700, 3000),))
    with patch.object(attention, "scaled_dot_product_attention", side_effect=scaled_dot_product_attention) as attend:
        attend_to_prefix(None, **form.arguments(torch.float32))
    assert max(call.kwargs["attn_mask"].shape[0] for call in attend.call_args_list) == 512
