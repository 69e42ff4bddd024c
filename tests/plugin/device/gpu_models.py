"""A model that is small enough for Triton's interpreter, and what a tree has of a prompt."""

from __future__ import annotations

import pytest
import torch

from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.protocol import quantiser
from tests.codec.quant.profiles import make_profile
from tests.plugin.device import rig as device_rig, rig as linker_rig
from tests.plugin.device.rig import Rig

LAYERS, HEADS, DIM = 3, 2, 8


def use_small_model(monkeypatch: pytest.MonkeyPatch, num_heads: int = HEADS) -> None:
    """Let rigs have this model. The CPU's fastest products round more than one in float32, so they are not used."""
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 32)
    for module in (device_rig, linker_rig):
        for name, value in (("LAYERS", LAYERS), ("HEADS", num_heads), ("DIM", DIM)):
            monkeypatch.setattr(module, name, value)


def make_quantiser(num_heads: int = HEADS) -> KltQuantiser:
    rope = Rope(inv_freq=tuple(100.0 ** (-i / 4) for i in range(4)))
    profile = make_profile(num_layers=LAYERS, num_heads=num_heads, head_dim=DIM, cell_layers=2, cell_heads=1, rope=rope)
    return KltQuantiser(profile, step=0.25)


def loaded(rig: Rig, tokens: list[int]) -> list[torch.Tensor]:
    """Return what the tree has of a prompt after it was admitted, layer by layer, K then V."""
    request = rig.arrive_staged(tokens)
    assert rig.admit(request) == [len(tokens)]
    slots = rig.slots_of(tokens)
    assert len(slots) == len(tokens)
    return [buffer[slots] for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer)]
