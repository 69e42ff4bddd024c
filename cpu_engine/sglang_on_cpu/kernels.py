"""What SGLang computes with Triton for short convolutions, Mamba-2 and gated delta rules, in PyTorch.

`seams.py` says where each function is installed. These are the kernels that Triton's interpreter does not accept, and
those that it runs once for each token; models with states at page boundaries need the interpreter, too, for others
(``TRITON_INTERPRET=1``). Parameters have the names of SGLang's own; what only kernels or speculative decoding need is
ignored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
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


def bind_convolutions(result: None, mixer: Any, *args: Any, **kwargs: Any) -> None:
    """After ``MambaMixer2.__init__``: give its module the two convolutions, which it imports for accelerators alone."""
    from sglang.srt.layers.attention.mamba import mamba

    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", convolve_prompts)
        setattr(mamba, f"causal_conv1d_update{suffix}", convolve_tokens)


def scan_prompts(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    state_dtype: torch.dtype | None = None,
    initial_states: torch.Tensor | None = None,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Instead of ``mamba_chunk_scan_combined``: go through sequences, one after another, from their states on.

    Args:
        x, out: ``(1, tokens, heads, dim)``. ``out`` is written in place.
        dt: ``(1, tokens, heads)``, before its bias and softplus.
        A, D, dt_bias: ``(heads,)``.
        B, C: ``(1, tokens, groups, state)``. As many heads follow one another as share a group.
        chunk_size: how many tokens, counted from the batch's first, are between two of the returned states.
        initial_states: ``(sequences, heads, dim, state)``. Without it, they are zeros.
        track_seq_idx, track_end_locs: sequences, and places in the batch, where a state is returned as well.

    Returns:
        The states in front of each chunk, at the end of each sequence, and in front of ``track_end_locs``.
    """
    assert D is not None
    assert dt_bias is not None
    assert cu_seqlens is not None
    assert out is not None
    num_tokens, num_heads = x.shape[1:3]
    B, C = (each[0].repeat_interleave(num_heads // each.shape[2], dim=1) for each in (B, C))
    step = functional.softplus(dt[0] + dt_bias)
    starts = cu_seqlens.tolist()
    tracked = [] if track_end_locs is None else track_end_locs.tolist()
    states = x.new_zeros(-(-num_tokens // chunk_size), num_heads, x.shape[3], B.shape[2], dtype=state_dtype)
    last = states.new_empty(len(starts) - 1, *states.shape[1:])
    at_tracked = states.new_empty(len(tracked), *states.shape[1:])
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        state = states.new_zeros(states.shape[1:]) if initial_states is None else initial_states[number]
        places = {start, *range(-(-start // chunk_size) * chunk_size, end, chunk_size), end}
        mine = [row for row, place in enumerate(tracked) if track_seq_idx is not None and track_seq_idx[row] == number]
        bounds = sorted(places | {tracked[row] for row in mine})
        for first, behind in zip(bounds, [*bounds[1:], end], strict=True):
            if first % chunk_size == 0 and first < end:
                states[first // chunk_size] = state
            for row in mine:
                if tracked[row] == first:
                    at_tracked[row] = state
            if first < behind:
                part = slice(first, behind)
                out[0, part], state = _scan(x[0, part], step[part], A, B[part], C[part], D, state.float())
        last[number] = state
    return states[None], last, at_tracked[None] if tracked else None


def _scan(
    x: torch.Tensor,
    step: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Go through tokens: ``state = exp(A * step) * state + step * x B``, ``output = state C + D x``. Return the output
    and the state. Shapes: as in `scan_prompts`, without the batch, and with a group for each head.

    All tokens at once, as attention with weights that decay: *Transformers are SSMs* (arXiv 2405.21060), section 6.
    """
    row, column = torch.arange(len(x))[:, None, None], torch.arange(len(x))[:, None]
    # From a token, a column, to a later one, a row. As differences between sums of all, they would be less precise.
    decay = ((A * step)[:, None] * (row > column)).cumsum(0).masked_fill(row < column, -torch.inf)
    weights = torch.einsum("thn,shn->tsh", C, B) * decay.exp() * step
    output = torch.einsum("tsh,shd->thd", weights, x) + D[:, None] * x
    since_before = (A * step).cumsum(0).exp()[..., None]
    output += torch.einsum("thn,hdn->thd", C * since_before, state)
    added = torch.einsum("sh,shd,shn->hdn", decay[-1].exp() * step, x, B)
    return output, since_before[-1, :, None] * state + added


def scan_tokens(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    state_batch_indices: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """Instead of ``selective_state_update``: the same for the next token of each sequence, ``(sequences, heads, dim)``,
    into ``out``. SGLang repeats here what a head has once."""
    assert D is not None
    assert dt_bias is not None
    assert out is not None
    B, C = (each.repeat_interleave(x.shape[1] // each.shape[1], dim=1) for each in (B, C))
    step = functional.softplus(dt + dt_bias)[..., None]
    after = (A * step).exp() * state[state_batch_indices] + step * x[..., None] * B[:, :, None]
    state[state_batch_indices] = after.to(state.dtype)
    out.copy_((after * C[:, :, None]).sum(-1) + D * x)


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
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], dim=2) for x in (q, k))
    output, states = _by_chunks(
        torch_chunk_gated_delta_rule, (q, k, v, g, beta), initial_state, initial_state_indices, cu_seqlens
    )
    return output, None, torch.cat(states)[None]


def _by_chunks(
    rule: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    initial_state: torch.Tensor | None,
    initial_state_indices: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Apply ``rule``, one of transformers' functions, to sequences. Return the output, and the states before each chunk
    of each sequence."""
    from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE

    assert initial_state is not None
    assert initial_state_indices is not None
    assert cu_seqlens is not None
    outputs, states = [], []
    for slot, (start, end) in zip(initial_state_indices.tolist(), itertools.pairwise(cu_seqlens.tolist()), strict=True):
        before = []
        for first in range(start, end, CHUNK_SIZE):
            before.append(initial_state[slot].clone())
            output, state = rule(
                *(x[:, first : min(first + CHUNK_SIZE, end)] for x in inputs),
                initial_state=initial_state[slot, None].transpose(-1, -2),  # there the dimension of K comes first
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            initial_state[slot] = state[0].transpose(-1, -2)
            outputs.append(output)
        states.append(torch.stack(before))
    return torch.cat(outputs, dim=1), states


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
        *gate_delta_rule(A_log, a, b, dt_bias),
        initial_state=initial_state,
        initial_state_indices=ssm_state_indices,
        cu_seqlens=torch.arange(len(mixed_qkv) + 1),
    )
    out.copy_(output.transpose(0, 1))


def gate_delta_rule(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Instead of ``fused_gdn_gating``: return the decay's logarithm and beta, float32 ``(1, tokens, heads)`` each."""
    decay = -A_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid().to(b.dtype).float()[None]


def apply_kimi_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    initial_state_indices: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_intermediate_states: bool = False,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Instead of ``chunk_kda``: the same for Kimi's delta rule, where each channel of K decays by itself.

    Args:
        g, beta: before their activations.
        track_state: gets the state of each sequence in front of the chunk that ``track_chunk_idx`` names, unless that
            is negative.

    Returns:
        The output and, with ``output_intermediate_states``, the states in front of each chunk of each sequence.
    """
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention

    assert A_log is not None
    assert dt_bias is not None
    assert lower_bound is None, lower_bound
    gate = -A_log.reshape(-1, 1).exp() * functional.softplus(g.reshape(k.shape) + dt_bias.reshape(k.shape[2:]))
    inputs = q, k, v, gate, beta.reshape(k.shape[:3]).sigmoid()
    output, states = _by_chunks(chunk_kimi_delta_attention, inputs, initial_state, initial_state_indices, cu_seqlens)
    if track_state is not None and track_chunk_idx is not None:
        for row, chunk in enumerate(track_chunk_idx.tolist()):
            if chunk >= 0:
                track_state[row] = states[row][chunk]
    return (output, torch.cat(states)[None]) if output_intermediate_states else output


def apply_kimi_delta_rule_to_tokens(
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
    lower_bound: float | None = None,
) -> None:
    """Instead of ``fused_recurrent_kda_packed_decode``: the same for the next token of each sequence."""
    q, k, v = (x.reshape(1, len(x), out.shape[2], -1) for x in mixed_qkv.chunk(3, dim=1))
    output = apply_kimi_delta_rule(
        q,
        k,
        v,
        a,
        b,
        initial_state=initial_state,
        initial_state_indices=ssm_state_indices,
        cu_seqlens=torch.arange(len(mixed_qkv) + 1),
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
    )
    out.copy_(output.transpose(0, 1))


def normalise_and_gate(
    *, x: torch.Tensor, weight: torch.Tensor, bias: None, eps: float, z: torch.Tensor, activation: str, **kwargs: Any
) -> torch.Tensor:
    """Instead of ``rms_norm_gated``: the root mean square norm of ``x``, times ``silu(z)`` or ``sigmoid(z)``."""
    assert activation in ("swish", "silu", "sigmoid"), activation
    gate = z.sigmoid() if activation == "sigmoid" else functional.silu(z)
    return functional.rms_norm(x, weight.shape, weight, eps) * gate


def normalise_and_gate_rows(
    x: torch.Tensor, g: torch.Tensor, weight: torch.Tensor, bias: None, activation: str = "swish", **kwargs: Any
) -> torch.Tensor:
    """The same instead of another ``rms_norm_gated``, whose gate is ``g``."""
    return normalise_and_gate(x=x, weight=weight, bias=bias, eps=kwargs["eps"], z=g, activation=activation)


def split_projections(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, num_heads_qk: int, num_heads_v: int, head_qk: int, head_v: int
) -> tuple[torch.Tensor, ...]:
    """Instead of ``fused_qkvzba_split_reshape_cat_contiguous``: return a row's ``[q | k | v]``, ``z``, ``b`` and ``a``,
    from ``[q | k | v | z]`` and ``[b | a]``."""
    dim_v = num_heads_v * head_v
    qkv, z = torch.split(mixed_qkvz, [2 * num_heads_qk * head_qk + dim_v, dim_v], dim=1)
    b, a = torch.split(mixed_ba, num_heads_v, dim=1)
    return qkv.contiguous(), z.reshape(-1, num_heads_v, head_v).contiguous(), b.contiguous(), a.contiguous()


def gate_attention(attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """Instead of ``fused_sigmoid_mul``: multiply by ``sigmoid(gate)``, which has heads as a dimension or has not."""
    gated = (attn_output.float() * gate.reshape(attn_output.shape).float().sigmoid()).to(attn_output.dtype)
    return attn_output.copy_(gated) if inplace else gated
