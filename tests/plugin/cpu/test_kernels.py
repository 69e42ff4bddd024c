from __future__ import annotations

import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from sgl_kvfetch.plugin.cpu.kernels import (
    apply_delta_rule,
    apply_delta_rule_to_tokens,
    convolve_prompts,
    convolve_tokens,
)

CHANNELS, WIDTH, SLOTS = 6, 4, 5
HEADS, HEADS_V, DIM_K, DIM_V = 2, 4, 8, 6


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


def test_the_delta_rule_goes_on_from_states_and_returns_those_before_each_chunk() -> None:
    lengths = [150, 70]
    total = sum(lengths) + 2  # and one token more of each
    qkv = torch.randn(total, 2 * HEADS * DIM_K + HEADS_V * DIM_V)
    a, b = torch.randn(total, HEADS_V), torch.randn(total, HEADS_V)
    a_log, dt_bias = torch.randn(HEADS_V), torch.randn(HEADS_V)
    q, k, v = (
        x.reshape(1, total, -1, dim)
        for x, dim in zip(qkv.split([HEADS * DIM_K] * 2 + [HEADS_V * DIM_V], 1), (DIM_K, DIM_K, DIM_V), strict=True)
    )
    inputs = q, k, v, (-a_log.exp() * functional.softplus(a + dt_bias))[None], b.sigmoid()[None]
    states = torch.randn(SLOTS, HEADS_V, DIM_V, DIM_K)
    slots = torch.tensor([3, 1])
    before = states.clone()

    ends = torch.tensor([0, *lengths]).cumsum(0)
    output, _, chunks = apply_delta_rule(
        *(x[:, :-2] for x in inputs), initial_state=states, initial_state_indices=slots, cu_seqlens=ends
    )
    last = torch.empty(2, 1, HEADS_V, DIM_V)
    apply_delta_rule_to_tokens(qkv[-2:], a[-2:], b[-2:], a_log, dt_bias, DIM_K**-0.5, states, last, slots)

    assert chunks.shape == (1, 3 + 2, HEADS_V, DIM_V, DIM_K)
    for row, (slot, start, end) in enumerate(zip(slots.tolist(), ends[:-1].tolist(), ends[1:].tolist(), strict=True)):
        tokens = [*range(start, end), total - 2 + row]
        expected, state = _recurrent([x[:, tokens] for x in inputs], before[slot])
        found = torch.cat([output[:, start:end], last[row][None]], 1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[slot], state, rtol=1e-4, atol=1e-5)
        _, early = _recurrent([x[:, start : start + 64] for x in inputs], before[slot])
        torch.testing.assert_close(chunks[0, 3 * row + 1], early, rtol=1e-4, atol=1e-5)
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
