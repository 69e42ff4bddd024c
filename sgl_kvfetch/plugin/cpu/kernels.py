"""What SGLang computes with Triton for short convolutions and the gated delta rule, in PyTorch.

`seams.py` says where each function is installed. These are the kernels that Triton's interpreter does not accept; a
model with the gated delta rule needs the interpreter, too, for others (``TRITON_INTERPRET=1``). Parameters have the
names of SGLang's own; what only kernels or speculative decoding need is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional


def convolve_prompts(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    **kwargs: Any,
) -> torch.Tensor:
    """Instead of ``causal_conv1d_fn``: convolve sequences, ``(channels, tokens)`` one after another, from their states
    on, and update the states."""
    assert cache_indices is not None
    assert has_initial_state is not None
    outputs = []
    rows = zip(
        cache_indices.tolist(), has_initial_state.tolist(), torch.split(x, list(seq_lens_cpu), dim=1), strict=True
    )
    for slot, is_continued, tokens in rows:
        state = conv_states[slot]
        before = state.to(x.dtype) if is_continued else torch.zeros_like(state, dtype=x.dtype)
        joined = torch.cat([before, tokens], dim=1)
        state.copy_(joined[:, -state.shape[1] :])
        outputs.append(_convolve(joined, weight, bias, activation))
    return torch.cat(outputs, dim=1)


def convolve_tokens(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Instead of ``causal_conv1d_update``: the same for the next token of each sequence, ``(sequences, channels)``."""
    assert conv_state_indices is not None
    joined = torch.cat([conv_state[conv_state_indices].to(x.dtype), x[..., None]], dim=-1)
    conv_state[conv_state_indices] = joined[..., 1:].to(conv_state.dtype)
    return _convolve(joined, weight, bias, activation)[..., 0]


def _convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None) -> torch.Tensor:
    out = functional.conv1d(x, weight[:, None], bias, groups=len(weight))
    return out if activation is None else functional.silu(out)


def apply_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Instead of ``chunk_gated_delta_rule``: go through sequences, ``(1, tokens, heads, dim)`` one after another, from
    their states on, and update the states. Return the output, and the states before each chunk of a sequence."""
    from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    assert initial_state is not None
    assert initial_state_indices is not None
    assert cu_seqlens is not None
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    starts = cu_seqlens.tolist()
    outputs, states = [], []
    for slot, start, end in zip(initial_state_indices.tolist(), starts[:-1], starts[1:], strict=True):
        for first in range(start, end, CHUNK_SIZE):
            states.append(initial_state[slot].clone())
            output, state = torch_chunk_gated_delta_rule(
                *(x[:, first : min(first + CHUNK_SIZE, end)] for x in (q, k, v, g, beta)),
                initial_state=initial_state[slot, None].transpose(-1, -2),  # there the dimension of K comes first
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            initial_state[slot] = state[0].transpose(-1, -2)
            outputs.append(output)
    return torch.cat(outputs, dim=1), None, torch.stack(states)[None]


def apply_delta_rule_to_tokens(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> None:
    """Instead of ``fused_recurrent_gated_delta_rule_packed_decode``: the same for the next token of each sequence,
    ``(sequences, heads of Q, K and V)``, into ``out``, ``(sequences, 1, heads of V, dim)``."""
    dim_v, dim_k = initial_state.shape[-2:]
    size_v = out.shape[2] * dim_v
    size_k = (mixed_qkv.shape[1] - size_v) // 2
    q, k, v = torch.split(mixed_qkv, [size_k, size_k, size_v], dim=1)
    output, _, _ = apply_delta_rule(
        q.reshape(1, len(q), -1, dim_k),
        k.reshape(1, len(k), -1, dim_k),
        v.reshape(1, len(v), -1, dim_v),
        -A_log.exp() * functional.softplus(a + dt_bias)[None],
        b.sigmoid()[None],
        initial_state=initial_state,
        initial_state_indices=ssm_state_indices,
        cu_seqlens=torch.arange(len(mixed_qkv) + 1),
    )
    out.copy_(output.transpose(0, 1))


def normalise_and_gate(
    *, x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float, z: torch.Tensor, activation: str, **kwargs: Any
) -> torch.Tensor:
    """Instead of ``rms_norm_gated``: the root mean square norm of ``x``, times ``silu(z)``."""
    assert activation == "swish", activation
    return functional.rms_norm(x, weight.shape, weight, eps) * functional.silu(z)
