"""What attention adds to the stream, in families that do different things with attention's output.

The weights W of errors are compared with finite differences: with its MLP silenced, a layer's output changes with the
context's K and V by what attention adds, and by nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from harness.layer_maps import plain_layers
from harness.models import make_tiny
from sgl_kvfetch.codec.calibrate import sweep
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.codec.calibrate.sweep import MOST_SINKS, Sweep
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.types import CellGrid

CONTEXT, FOLLOWING, LAYERS = MOST_SINKS + 6, 10, 3
SHAPE = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "head_dim": 8,
    "initializer_range": 0.1,
}
MIXED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
GEMMA4 = MIXED | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16},  # these norm what attention gives
    "gemma3_text": MIXED,
    "gemma4_text": GEMMA4,  # ... and scale the whole stream
    "olmo2": {},
    "olmo3": MIXED,
    "glm4": {},
    "exaone4": MIXED,
    "llama": {},  # these add it as it is
    "qwen3": {},
    "granite": {"residual_multiplier": 0.22},  # scales it
    "cohere": {},  # attention and MLP side by side
    "phi": {},
    "gpt_neox": {"rotary_pct": 0.5},
    "bloom": {"n_head": 4, "num_key_value_heads": 4},  # attention adds the stream itself
}


def train(path: Path) -> None:
    """Make a random model's norms and scales those of a trained one."""
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, x in model.state_dict().items():
        if "norm" in name and x.ndim:  # trained norms scale by what is far from 1
            x.copy_(torch.rand_like(x) * 2 - 0.5)
        elif name.endswith("layer_scalar"):
            x.fill_(0.4)
    model.save_pretrained(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_of_finite_differences(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(tmp_path / "model", family, SHAPE | FAMILIES[family])
    train(path)
    monkeypatch.setattr(sweep, "_DRAWS", 500)
    ids = torch.randint(3, 256, (CONTEXT + FOLLOWING,), generator=torch.Generator().manual_seed(1))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        found = whole(ids[None], past_key_values=DynamicCache(), output_hidden_states=True)
    streams = [x[0] for x in found.hidden_states]
    model = LayeredModel(str(path))
    gathered = Sweep(
        model, [ids], [], CONTEXT, plain_layers(LAYERS), CellGrid(LAYERS, model.num_heads, 1, model.num_heads)
    )
    calls = model.calls(FOLLOWING, CONTEXT)
    for index in range(LAYERS - 1):  # transformers shows what is behind the last layer only normed
        moments = gathered.pass_layer(index)
        assert moments is not None
        cached = found.past_key_values.layers[index]
        past = CellValues(*(x[0, :, :CONTEXT].transpose(0, 1) for x in (cached.keys, cached.values)))
        for tensor, weight in enumerate(moments.weights_of(0)):
            expected = _cost(model, index, calls, past, tensor, streams)
            direction = _direction(past[tensor])
            cost = float(direction.flatten() @ weight.float() @ direction.flatten())
            assert cost == pytest.approx(expected, rel=0.2), (index, "kv"[tensor])


def _direction(x: torch.Tensor) -> torch.Tensor:
    """An error of one token, ``(heads, dim)``."""
    return torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(2))


def _cost(
    model: LayeredModel, index: int, calls: Any, past: CellValues, tensor: int, streams: list[torch.Tensor]
) -> float:
    """e^T W e for an error e in K or V, by finite differences: the mean over the context's tokens behind the sinks."""
    following, stream = streams[index][CONTEXT:], streams[index + 1][CONTEXT:]
    error = 1e-2 * _direction(past[tensor])
    costs = []
    with model.layer(index) as layer, torch.no_grad():
        layer._module.mlp.register_forward_hook(_silenced)
        for token in range(MOST_SINKS, CONTEXT):
            outputs = []
            for sign in (1, -1):
                kv = [x.clone() for x in past]
                kv[tensor][token] += sign * error
                outputs.append(layer.after(following, calls, KV(*kv)))
            change = (outputs[0] - outputs[1]) / 2e-2
            costs.append((change.norm(dim=-1) / stream.norm(dim=-1)).square().mean())
    return sweep._GAIN * float(torch.stack(costs).mean())


def _silenced(mlp: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
    return args[1] if len(args) > 1 else torch.zeros_like(output)  # Bloom's MLP adds the stream, its second argument
