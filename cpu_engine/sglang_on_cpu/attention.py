"""Attention of SGLang's `torch_native` backend, for the new tokens of a prompt alone.

SGLang pads the query of a sequence to the sequence's whole length, so that PyTorch's ``is_causal`` fits, and drops the
padding from the result. Sixteen tokens behind a stored prefix of 4,080 then cost as much as 4,096 tokens. Here the new
tokens attend by themselves, with a mask.

The result has the same bits, which takes some care, since sums in another order round differently:

* PyTorch's attention on CPUs goes through the keys in blocks of 512. Keys are cut only where such a block begins or
  ends. A block that a row may not see adds nothing to the row.
* MKL multiplies up to three rows in another order than more. So rows are padded to a multiple of eight. SGLang's own
  blocks of 32, 64 or 256 rows may end with one to three: in float32 these rows alone differ, by a rounding.
* If the heads of V have another size than those of K, PyTorch sums over all keys at once, and none are left out.

Queries are taken in blocks, too: a mask has at most 512 rows, however long the chunk of the prompt is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

_BLOCK = 512  # tokens: the keys that PyTorch's flash attention takes at once on CPUs
_ROWS = 8


def attend_to_prefix(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Instead of ``TorchNativeAttnBackend._run_sdpa_forward_extend``: attend with the new tokens of each sequence.

    Args:
        query: ``(new tokens, heads, dim)`` of all sequences, one sequence after another.
        output: ``(new tokens, heads, dim of V)``, written in place.
        k_cache, v_cache: ``(slots, heads of K and V, dim)``.
        req_to_token: ``(requests, tokens)``: the slots of each request's tokens.
        seq_lens, extend_prefix_lens, extend_seq_lens: a sequence's tokens: all, those before the new, the new.
        encoder_lens: tokens of each sequence that an encoder made. They lie in front of the others.
        sliding_window_size: how many tokens before its own a token sees; None or -1 for all.
    """
    window = None if sliding_window_size is None or sliding_window_size < 0 else sliding_window_size
    start = 0
    for i, request in enumerate(req_pool_indices.tolist()):
        num_tokens, num_before, num_new = (int(lens[i]) for lens in (seq_lens, extend_prefix_lens, extend_seq_lens))
        num_encoded = 0 if encoder_lens is None else int(encoder_lens[i])
        slots = req_to_token[request, :num_encoded] if is_cross_attn else req_to_token[request, num_encoded:]
        if not is_cross_attn:
            slots = slots[:num_tokens]
        new = slice(start, start + num_new)
        q = query[new].transpose(0, 1)
        # Four times as fast as indexing.
        k, v = (cache.index_select(0, slots).to(q.dtype).transpose(0, 1) for cache in (k_cache, v_cache))
        if causal and (num_before or window is not None):
            attended = _attend_in_blocks(q, k, v, num_before, window, scaling, enable_gqa)
        else:
            attended = _attend(q, k, v, scale=scaling, enable_gqa=enable_gqa, is_causal=causal)
        output[new] = attended.transpose(0, 1)
        start += num_new
    return output


def _attend_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    num_before: int,
    window: int | None,
    scale: float | None,
    enable_gqa: bool,
) -> torch.Tensor:
    """Attend with ``q``, ``(heads, new tokens, dim)``, whose first row is token ``num_before``, to ``k`` and ``v``,
    ``(heads, all tokens, dim)``."""
    num_tokens = k.shape[1]
    may_cut_front = window is not None and q.shape[2] == v.shape[2]
    outputs = []
    first = num_before
    while first < num_tokens:
        end = min((first // _BLOCK + 1) * _BLOCK, num_tokens)
        rows = pad(q[:, first - num_before : end - num_before], (0, 0, 0, (first - end) % _ROWS))
        keys_from = max(0, first - window) // _BLOCK * _BLOCK if may_cut_front and window is not None else 0
        keys_to = min(-(-end // _BLOCK) * _BLOCK, num_tokens)
        query_pos = torch.arange(first, first + rows.shape[1])[:, None]
        key_pos = torch.arange(keys_from, keys_to)
        mask = key_pos <= query_pos
        if window is not None:
            mask &= key_pos >= query_pos - window
        keys = slice(keys_from, keys_to)
        attended = _attend(rows, k[:, keys], v[:, keys], scale=scale, enable_gqa=enable_gqa, attn_mask=mask)
        outputs.append(attended[:, : end - first])
        first = end
    return torch.cat(outputs, dim=1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return scaled_dot_product_attention(q[None], k[None], v[None], **kwargs)[0]
