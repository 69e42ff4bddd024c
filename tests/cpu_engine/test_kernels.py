from __future__ import annotations

import inspect
from functools import partial

import torch
from sglang.kernels.ops.attention.triton_gdn_fused_proj import fused_qkvzba_split_reshape_cat_contiguous
from sglang.kernels.ops.elementwise.elementwise import fused_sigmoid_mul
from sglang.srt.layers.attention.linear.gdn_backend import fused_gdn_gating
from torch.nn import functional
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from sglang_on_cpu.kernels import (
    apply_delta_rule,
    apply_delta_rule_to_tokens,
    apply_kimi_delta_rule,
    apply_kimi_delta_rule_to_tokens,
    convolve_prompts,
    convolve_tokens,
    gate_attention,
    gate_delta_rule,
    normalise_and_gate,
    normalise_and_gate_rows,
    scan_prompts,
    scan_tokens,
    split_projections,
)

CHANNELS, WIDTH, SLOTS = 6, 4, 5
HEADS, HEADS_V, DIM_K, DIM_V = 2, 4, 8, 6
# Two prompts, one behind the other, and one token more of each behind both. Their slots, and their tokens.
LENGTHS, TOTAL, USED = [150, 70], 222, torch.tensor([3, 1])
ENDS = torch.tensor([0, *LENGTHS]).cumsum(0)
SEQUENCES = (3, [*range(150), 220]), (1, [*range(150, 220), 221])
assert_close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)


def test_a_sequence_in_parts_is_convolved_like_the_whole() -> None:
    x, weight, bias = torch.randn(CHANNELS, 9), torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    other = torch.randn(CHANNELS, 2)
    states = torch.full((SLOTS, CHANNELS, WIDTH - 1), torch.nan)

    first = _convolve([x[:, :1], other], weight, bias, states, is_continued=False)
    second = _convolve([x[:, 1:8], other], weight, bias, states, is_continued=True)
    last = convolve_tokens(x[None, :, 8], states, weight, bias, "silu", conv_state_indices=torch.tensor([3]))

    whole = functional.conv1d(functional.pad(x, (WIDTH - 1, 0)), weight[:, None], bias, groups=CHANNELS)
    found = torch.cat([first[:, :1], second[:, :7], last.T], dim=1)
    torch.testing.assert_close(found, functional.silu(whole))
    torch.testing.assert_close(states[3], x[:, -WIDTH + 1 :], rtol=0, atol=0)
    assert states[[0, 2, 4]].isnan().all()


def _convolve(
    pieces: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor, states: torch.Tensor, *, is_continued: bool
) -> torch.Tensor:
    lengths = [piece.shape[1] for piece in pieces]
    return convolve_prompts(
        torch.cat(pieces, dim=1),
        weight,
        bias,
        states,
        torch.tensor([0, *lengths]).cumsum(0),
        lengths,
        torch.tensor([3, 1]),
        torch.tensor([is_continued] * 2),
    )


def test_both_functions_of_sglang_gate_what_is_normed() -> None:
    x, gate, weight = torch.randn(3, HEADS_V, DIM_V), torch.randn(3, HEADS_V, DIM_V), torch.randn(DIM_V)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight * gate * gate.sigmoid()
    rows = normalise_and_gate_rows(x, gate, weight, None, "swish", residual=None, prenorm=False, eps=1e-5)
    torch.testing.assert_close(rows, expected)
    for activation, times in (("swish", expected), ("sigmoid", expected / gate)):
        found = normalise_and_gate(x=x, weight=weight, bias=None, eps=1e-5, z=gate, activation=activation)
        torch.testing.assert_close(found, times)


def test_the_delta_rule_goes_on_from_states_and_returns_those_before_each_chunk() -> None:
    qkv = torch.randn(TOTAL, 2 * HEADS * DIM_K + HEADS_V * DIM_V)
    a, b = torch.randn(TOTAL, HEADS_V), torch.randn(TOTAL, HEADS_V)
    a_log, dt_bias = torch.randn(HEADS_V), torch.randn(HEADS_V)
    q, k, v = (
        x.reshape(1, TOTAL, -1, dim)
        for x, dim in zip(qkv.split([HEADS * DIM_K] * 2 + [HEADS_V * DIM_V], 1), (DIM_K, DIM_K, DIM_V), strict=True)
    )
    inputs = q, k, v, (-a_log.exp() * functional.softplus(a + dt_bias))[None], b.sigmoid()[None]
    states = torch.randn(SLOTS, HEADS_V, DIM_V, DIM_K)
    before = states.clone()

    output, _, chunks = apply_delta_rule(
        *(x[:, :-2] for x in inputs), initial_state=states, initial_state_indices=USED, cu_seqlens=ENDS
    )
    last = torch.empty(2, 1, HEADS_V, DIM_V)
    apply_delta_rule_to_tokens(qkv[-2:], a[-2:], b[-2:], a_log, dt_bias, DIM_K**-0.5, states, last, USED)

    assert chunks.shape == (1, 3 + 2, HEADS_V, DIM_V, DIM_K)
    for row, (slot, tokens) in enumerate(SEQUENCES):
        expected, state = _recurrent([x[:, tokens] for x in inputs], before[slot])
        assert_close(torch.cat([output[:, tokens[:-1]], last[row][None]], 1), expected)
        assert_close(states[slot], state)
        assert_close(chunks[0, 3 * row + 1], _recurrent([x[:, tokens[:64]] for x in inputs], before[slot])[1])
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def _recurrent(inputs: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, *rest = inputs
    output, after = torch_recurrent_gated_delta_rule(
        *(x.repeat_interleave(HEADS_V // HEADS, dim=2) for x in (q, k)),
        *rest,
        initial_state=state[None].transpose(-1, -2),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return output, after[0].transpose(-1, -2)


def test_kimi_s_delta_rule_goes_on_from_states_and_tracks_those_on_the_way() -> None:
    qkv, gate = torch.randn(TOTAL, 3 * HEADS * DIM_K), torch.randn(TOTAL, HEADS * DIM_K)
    beta, a_log, dt_bias = torch.randn(TOTAL, HEADS), torch.randn(1, 1, HEADS, 1), torch.randn(HEADS * DIM_K)
    q, k, v = (x.reshape(1, TOTAL, HEADS, DIM_K) for x in qkv.chunk(3, dim=1))
    states = torch.randn(SLOTS, HEADS, DIM_K, DIM_K)
    before = states.clone()

    tracked = torch.full((2, HEADS, DIM_K, DIM_K), torch.nan)
    output, chunks = apply_kimi_delta_rule(
        *(x[:, :-2] for x in (q, k, v, gate[None], beta[None])),
        initial_state=states,
        initial_state_indices=USED,
        cu_seqlens=ENDS,
        A_log=a_log,
        dt_bias=dt_bias,
        output_intermediate_states=True,
        track_state=tracked,
        track_chunk_idx=torch.tensor([-1, 1]),
    )
    last = torch.empty(2, 1, HEADS, DIM_K)
    apply_kimi_delta_rule_to_tokens(qkv[-2:], gate[-2:], beta[-2:], a_log, dt_bias, DIM_K**-0.5, states, last, USED)

    decay = -a_log.exp() * functional.softplus(gate + dt_bias).reshape(1, TOTAL, HEADS, DIM_K)
    assert chunks.shape == (1, 3 + 2, HEADS, DIM_K, DIM_K)
    assert tracked[0].isnan().all()
    for row, (slot, tokens) in enumerate(SEQUENCES):
        for end, state in ((len(tokens), states[slot]), (64, chunks[0, 3 * row + 1])):
            expected, after = recurrent_kimi_delta_attention(
                *(x[:, tokens[:end]] for x in (q, k, v, decay, beta[None].sigmoid())),
                initial_state=before[slot, None].transpose(-1, -2),
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            assert_close(state, after[0].transpose(-1, -2))
            if end == len(tokens):
                assert_close(torch.cat([output[:, tokens[:-1]], last[row][None]], 1), expected)
    assert torch.equal(tracked[1], chunks[0, 4])
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


GROUPS, DIM, DIM_STATE, CHUNK = 2, 6, 5, 64


def test_mamba_2_goes_on_from_states_and_returns_those_on_the_way() -> None:
    x, dt = torch.randn(TOTAL, HEADS_V, DIM), torch.randn(TOTAL, HEADS_V)
    b, c = torch.randn(2, TOTAL, GROUPS, DIM_STATE).unbind()
    a, d, dt_bias = -torch.rand(HEADS_V), torch.randn(HEADS_V), torch.randn(HEADS_V)
    states = torch.randn(SLOTS, HEADS_V, DIM, DIM_STATE)
    before = states.clone()

    out = torch.full((TOTAL - 2, HEADS_V, DIM), torch.nan)
    on_grid, states[USED], tracked = scan_prompts(
        x[None, :-2],
        dt[None, :-2],
        a,
        b[None, :-2],
        c[None, :-2],
        CHUNK,
        D=d,
        dt_bias=dt_bias,
        cu_seqlens=ENDS,
        out=out[None],
        state_dtype=torch.float32,
        initial_states=before[USED],
        track_seq_idx=torch.tensor([1]),
        track_end_locs=torch.tensor([150 + 64]),
    )
    last = torch.full((2, HEADS_V, DIM), torch.nan)
    scan_tokens(
        states,
        x[-2:],
        dt[-2:, :, None].expand(-1, -1, DIM),
        a[:, None, None].expand(-1, DIM, DIM_STATE),
        b[-2:],
        c[-2:],
        D=d[:, None].expand(-1, DIM),
        dt_bias=dt_bias[:, None].expand(-1, DIM),
        state_batch_indices=USED,
        out=last,
    )

    assert on_grid.shape == (1, 4, HEADS_V, DIM, DIM_STATE)
    assert tracked is not None
    for row, (slot, tokens) in enumerate(SEQUENCES):
        outputs, after = [], [before[slot]]
        for t in tokens:  # token by token
            step = functional.softplus(dt[t] + dt_bias)[:, None, None]
            of_b, of_c = (y[t].repeat_interleave(HEADS_V // GROUPS, dim=0)[:, None] for y in (b, c))
            after.append((a[:, None, None] * step).exp() * after[-1] + step * x[t, :, :, None] * of_b)
            outputs.append((after[-1] * of_c).sum(-1) + d[:, None] * x[t])
        del after[0]
        assert_close(torch.cat([out[tokens[:-1]], last[row, None]]), torch.stack(outputs))
        assert_close(states[slot], after[-1])
        if slot == 3:
            assert_close(on_grid[0, :3], torch.stack([before[3], after[63], after[127]]))
        else:
            assert_close(on_grid[0, 3], after[192 - 150 - 1])
            assert_close(tracked[0, 0], after[63])
    assert torch.equal(states[[0, 2, 4]], before[[0, 2, 4]])


def test_what_runs_for_each_token_is_what_sglangs_kernels_compute() -> None:
    """In Triton's interpreter, and in memory that lies as theirs does: SGLang views it in other shapes."""
    mixed_qkvz, mixed_ba = torch.randn(3, 2 * HEADS * DIM_K + 2 * HEADS_V * 4), torch.randn(3, 2 * HEADS_V)
    shapes = HEADS, HEADS_V, DIM_K, 4
    expected = inspect.unwrap(fused_qkvzba_split_reshape_cat_contiguous)(mixed_qkvz, mixed_ba, *shapes)
    for found, x in zip(split_projections(mixed_qkvz, mixed_ba, *shapes), expected, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found, x, rtol=0, atol=0)

    a, b = (torch.randn(3, HEADS_V) * 20 for _ in range(2))  # softplus has two forms
    args = torch.randn(HEADS_V), a, b, torch.randn(HEADS_V)
    torch.testing.assert_close(gate_delta_rule(*args), inspect.unwrap(fused_gdn_gating)(*args))

    output = torch.randn(3, HEADS_V * DIM_K, dtype=torch.bfloat16)
    wide = torch.randn(3, HEADS_V, 2 * DIM_K, dtype=torch.bfloat16)
    for gate in (wide[..., :DIM_K], torch.randn_like(output)):
        gated = inspect.unwrap(fused_sigmoid_mul)(output, gate)
        torch.testing.assert_close(gate_attention(output, gate), gated)
        changed = output.clone()
        assert gate_attention(changed, gate, inplace=True) is changed
        torch.testing.assert_close(changed, gated)
