"""The rotation that is taken off K is SGLang's own, in its order of operations. `test_layer_map` has frequencies."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from sglang.srt.layers.rotary_embedding import base as sglang_base, get_rope

from sgl_kvfetch.codec.quant.rope import Rope, Rotations, rotate, unrotate

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it SGLang asks for vLLM's kernel, unless our CPU platform was there when SGLang was first imported."""
    monkeypatch.setattr(sglang_base, "_is_cpu", True)


FIRST_TOKENS = (0, 1, 1000, 4090, 65_000, 99_970)
NUM_TOKENS = 30
THETA = 10_000.0


def make_rope(rotary_dim: int = 64, **changes: Any) -> Rope:
    frequencies = 1.0 / THETA ** (torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim)
    return Rope(inv_freq=tuple(frequencies.tolist()), **changes)


@pytest.mark.parametrize("scaling", [1.0, 1.25])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (80, 32), (96, 24)])
def test_rotation_is_sglangs(head_dim: int, rotary_dim: int, neox: bool, scaling: float) -> None:
    rope = make_rope(rotary_dim, interleaved=not neox, attention_scaling=scaling)
    assert rope.rotary_dim == rotary_dim
    theirs = get_rope(head_dim, rotary_dim, 100_000, THETA, neox, None, torch.float32)
    k = torch.randn(NUM_TOKENS, 3, head_dim, generator=torch.Generator().manual_seed(5)) * 4
    for first_token in FIRST_TOKENS:
        table = rope.table(first_token, NUM_TOKENS)
        expected_table = scaling * theirs.cos_sin_cache[first_token : first_token + NUM_TOKENS]
        torch.testing.assert_close(table, expected_table, rtol=0, atol=1e-5)
        positions = torch.arange(first_token, first_token + NUM_TOKENS)
        _, turned = theirs.forward_native(positions, k.flatten(1).clone(), k.flatten(1).clone())
        expected = turned.view_as(k).clone()
        expected[..., :rotary_dim] *= scaling
        rotated = rotate(k, table, rope)
        torch.testing.assert_close(rotated, expected, rtol=0, atol=1e-5 * float(k.abs().max()))
        torch.testing.assert_close(unrotate(rotated, table, rope), k, rtol=0, atol=1e-5)


def test_a_segments_rows_do_not_depend_on_where_it_was_cut() -> None:
    rope = make_rope()
    whole = rope.table(0, 4200)
    assert torch.equal(torch.cat((rope.table(0, 64), rope.table(64, 4096), rope.table(4160, 40))), whole)


@pytest.mark.parametrize(("num_ropes", "pairs", "kept"), [(1, 32, 32), (16, 64, 4), (16, 4096, 1)])
def test_tables_that_are_kept_are_bounded_by_bytes(num_ropes: int, pairs: int, kept: int) -> None:
    ropes = tuple(Rope(inv_freq=(1.0 + i / 100,) * pairs) for i in range(num_ropes))
    rotations = Rotations(ropes, tuple(range(num_ropes)))
    tables = [weakref.ref(rotations.table(first, 2)) for first in range(40)]
    assert [table() is not None for table in tables] == [False] * (40 - kept) + [True] * kept
