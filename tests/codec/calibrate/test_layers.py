"""A layer at a time, models compute what transformers computes with all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from harness.layer_maps import plain_layers
from harness.models import (
    FAMILIES,
    IMAGE_TEXT,
    OTHER_FAMILIES,
    make_tiny,
    make_tiny_deepseek,
    make_tiny_image_text,
    make_tiny_lfm2,
    make_tiny_mellum,
    make_tiny_qwen3_5,
)
from sgl_kvfetch.codec.calibrate import layers
from sgl_kvfetch.codec.calibrate.fit import CalibrationOptions, calibrate_model, cell_grid
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.codec.calibrate.sweep import Sweep
from sgl_kvfetch.codec.quant.layer_map import Pool
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from tests.codec.quant.profiles import CALIBRATION

SHAPE = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "head_dim": 32}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA4 = {"layer_types": ["sliding_attention", *["full_attention"] * 2], "sliding_window": 16, "global_head_dim": 32}
NARROW = {"hidden_size_per_layer_input": 0, "global_head_dim": 16}


def make(path: Path, model_type: str, **changes: Any) -> Path:
    return make_tiny(path, model_type, SHAPE | changes)


WITH_IMAGES = *IMAGE_TEXT, "mistral3", "gemma3"


@pytest.mark.parametrize("model_type", WITH_IMAGES)
def test_language_models_inside_image_text_checkpoints(tmp_path: Path, model_type: str) -> None:
    """They compute what the whole model does with text, and the weights of its encoder are not read, although its
    layers have the same numbers."""
    path = tmp_path / "model"
    make_tiny_image_text(path, model_type)
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    model = _require_equal(path, whole)
    names = [name for name, _ in model._model.named_parameters()]
    assert not [name for name in names if "vis" in name]
    windows = torch.randint(3, 256, (5, 288), generator=torch.Generator().manual_seed(0))
    profile = calibrate_model(
        model, {"text": [*windows]}, plain_layers(model.num_layers), CALIBRATION, CalibrationOptions(num_context=256)
    )
    assert profile.grid.num_layers == model.num_layers


MADE: dict[str, Callable[[Path], Path]] = {
    "deepseek_v3": make_tiny_deepseek,
    "lfm2": make_tiny_lfm2,
    "qwen3_5": make_tiny_qwen3_5,
    "mellum": partial(make_tiny_mellum, window=16),
}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen3_moe", FAMILIES["qwen3_moe"]),  # the checkpoint has the experts one by one
        ("gemma2", {"sliding_window": 64}),  # scaled embeddings, tied to the output, soft caps
        ("mistral", {"sliding_window": 64}),
        ("phi", {}),  # attention and MLP side by side; biases
        ("cohere", {}),
        ("gpt_neox", {}),  # its layers return tuples, and know the cache by another name
        ("bloom", {"n_head": 4}),
        ("deepseek_v3", {}),
        ("lfm2", {}),  # convolutions
        ("qwen3_5", {}),  # a gated delta rule
        ("mellum", {}),  # windows apart
        ("mimo_v2_flash", OTHER_FAMILIES["mimo_v2_flash"] | {"v_head_dim": 16}),  # V with heads of another size
        # Learned sinks; Mamba 2, and layers that are an MLP alone; MLA without a rotation, and Kimi's delta attention;
        # each token attends to 64 that an indexer chooses.
        *((name, OTHER_FAMILIES[name]) for name in ("gpt_oss", "gemma4_text", "nemotron_h", "granitemoehybrid")),
        *((name, OTHER_FAMILIES[name]) for name in ("kimi_linear", "glm_moe_dsa", "deepseek_v32")),
    ],
)
def test_layers_compute_what_the_whole_model_does(tmp_path: Path, model_type: str, changes: dict[str, Any]) -> None:
    path = tmp_path / "model"
    if model_type in MADE:
        MADE[model_type](path)
    else:
        make_tiny(path, model_type, changes)
    _require_equal(path, AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))


def _require_equal(path: Path, whole: Any) -> LayeredModel:
    """Compare the layers' computations with those of the whole model. More tokens than windows have."""
    ids = torch.randint(7, 256, (100,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = torch.log_softmax(whole(ids[None]).logits[0].float(), -1)
    model = LayeredModel(str(path))
    hidden, calls = model.embed(ids), model.calls(100)
    first, first_calls = hidden[:80], model.calls(80)
    after, after_calls = hidden[80:], model.calls(20, 80)
    for index in range(model.num_layers):
        with model.layer(index) as layer, torch.no_grad():
            hidden, whole_past = layer.forward(hidden, calls)
            first, past = layer.forward(first, first_calls)
            after = layer.after(after, after_calls, past)
        if model.pools[index] == Pool.KV:
            assert isinstance(whole_past, KV)
            assert whole_past.k.shape == (100, model.num_heads, model.k_head_dim)
            assert whole_past.v.shape == (100, model.num_heads, model.v_head_dim)
    torch.testing.assert_close(model.log_probabilities(hidden), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.log_probabilities(after), expected[80:], rtol=1e-4, atol=1e-4)
    return model


def test_keys_of_an_indexer_stay_exact(tmp_path: Path) -> None:
    """Layers choose tokens by them while K and V come from coefficients, also in a calibration that goes on."""
    narrow = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    indexer = {"head_dim": 8, "index_head_dim": 16, "index_topk": 16, "first_k_dense_replace": 3}
    path = make(tmp_path / "model", "deepseek_v32", **OTHER_FAMILIES["deepseek_v32"] | narrow | indexer)
    model = LayeredModel(str(path))
    layers, notes = map_layers(model)
    assert not notes
    assert {(layer.pool, layer.rotation) for layer in layers.layers} == {(Pool.KV, 0)}
    windows = torch.randint(3, 256, (5, 288), generator=torch.Generator().manual_seed(0))
    grid = cell_grid(model.num_layers, model.num_heads, model.k_head_dim + model.v_head_dim, 1536, 1)
    sweep = Sweep(model, [*windows[:3]], [*windows[3:]], 256, layers, grid)
    for index in range(model.num_layers):
        sweep.pass_layer(index)
    with model.layer(0) as layer:
        past = layer.forward(model.embed(windows[3][:256]), model.calls(256))[1]
    assert isinstance(past, KV)
    assert past.indexer is not None
    again = Sweep(model, [*windows[:3]], [*windows[3:]], 256, layers, grid)
    again.restore(sweep.state(model.num_layers))
    for each in (sweep, again):
        kept = each.others[0][0]
        assert isinstance(kept, torch.Tensor)
        assert torch.equal(kept, past.indexer)
    profile = calibrate_model(model, {"text": [*windows]}, layers, CALIBRATION, CalibrationOptions(num_context=256))
    assert profile.grid.num_layers == model.num_layers


def test_weights_in_fp8_are_restored(tmp_path: Path) -> None:
    """As checkpoints have them: a scale a block of 128 x 128."""
    pytest.importorskip("accelerate", reason="transformers needs it for FP8")
    path = make(tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
    file = path / "model.safetensors"
    plain, coded = load_file(file), {}
    for name, weight in list(plain.items()):
        if not name.endswith("proj.weight"):
            continue
        rows, columns = weight.shape
        blocks = [-(-n // 128) for n in weight.shape]
        padding = (0, blocks[1] * 128 - columns, 0, blocks[0] * 128 - rows)
        tiles = torch.nn.functional.pad(weight, padding).view(blocks[0], 128, blocks[1], 128)
        scales = tiles.abs().amax((1, 3), keepdim=True) / 448
        bits = (tiles / scales).to(torch.float8_e4m3fn)
        coded[name] = bits.view(blocks[0] * 128, -1)[:rows, :columns].contiguous()
        coded[f"{name}_scale_inv"] = scales[:, 0, :, 0].clone()
        plain[name] = (bits.float() * scales).view(blocks[0] * 128, -1)[:rows, :columns].contiguous()
    save_file(plain | coded, file, {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    model = LayeredModel(str(path))
    for index in range(model.num_layers):
        with model.layer(index):
            for name, weight in model._layers[index].named_parameters():
                expected = plain[f"model.layers.{index}.{name}"]
                torch.testing.assert_close(weight.data, expected, rtol=1e-2, atol=1e-6)


def test_weights_packed_by_llm_compressor_are_restored(tmp_path: Path) -> None:
    """Which is how it stores what it has made with GPTQ or AWQ: four bits, a scale for 128 weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    path = make(tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    apply_quantization_config(
        plain, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"], format="pack-quantized")
    )
    for module in plain.modules():
        if hasattr(module, "quantization_scheme"):
            blocks = module.weight.data.float().unflatten(1, (-1, 128))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), module.quantization_scheme.weights)
            module.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(plain, quantization_format="pack-quantized")
    compressor.compress_model(plain)
    plain.save_pretrained(path)
    compressor.update_config(path)
    assert any(name.endswith("weight_packed") for name in load_file(path / "model.safetensors"))

    ids = torch.arange(3, 60)
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(whole(ids[None]).logits[0], -1)
    model = LayeredModel(str(path))
    calls = model.calls(len(ids))
    for _ in range(2):  # a calibration passes the layers twice
        hidden = model.embed(ids)
        for index in range(model.num_layers):
            with model.layer(index) as layer:
                hidden, _ = layer.forward(hidden, calls)
        torch.testing.assert_close(model.log_probabilities(hidden), expected, rtol=1e-3, atol=1e-3)


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "llama")
    file = path / "model.safetensors"
    tensors = load_file(file)

    def save_without(name: str, **more: torch.Tensor) -> LayeredModel:
        save_file({key: x for key, x in tensors.items() if key != name} | more, file, {"format": "pt"})
        return LayeredModel(str(path))

    lost = "model.layers.1.mlp.up_proj.weight"
    model = save_without(lost)
    with pytest.raises(ConfigError, match=r"the checkpoint lacks mlp\.up_proj\.weight of layer 1"), model.layer(1):
        pass
    model = save_without(lost, **{lost: tensors[lost][:5]})
    with (
        pytest.raises(ConfigError, match=r"up_proj\.weight has the shape \(5, 64\), expected \(64, 64\)"),
        model.layer(1),
    ):
        pass
    with pytest.raises(ConfigError, match=r"the checkpoint lacks model\.norm\.weight"):
        save_without("model.norm.weight")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        LayeredModel(str(path))
    (path / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 64}))
    with pytest.raises(UnsupportedError, match="no language model of the type 'vit'"):
        LayeredModel(str(path))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "falcon_h1",
            {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 16},
            r"layers 0 to 2 \(hybrid\) of 3 keep other states, alongside keys and values",
        ),
        (
            "gemma4_text",
            GEMMA4 | {"num_kv_shared_layers": 1, "hidden_size_per_layer_input": 0},
            r"layer 2 \(full_attention\) of 3 keep no keys and values",
        ),
        (
            "gemma4_text",
            GEMMA4 | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256},
            "more of each token than hidden states",
        ),
        (
            "minimax",
            MIXTURE | {"num_local_experts": 4},
            r"layers 0 to 2 .* cannot run one by one: MiniMax uses cache of",
        ),
    ],
)
def test_layers_without_plain_keys_and_values_are_named(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    path = make(tmp_path / "model", model_type, **changes)
    with pytest.raises(UnsupportedError, match=message) as e:
        LayeredModel(str(path))
    assert str(e.value).startswith(f"{path}: ")
    assert "\n" not in str(e.value)


def test_coded_layers_of_different_shapes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Gemma 4's would be if SGLang had its windows in the same pool."""
    path = make(tmp_path / "model", "gemma4_text", **GEMMA4 | NARROW)
    monkeypatch.setattr(layers, "WINDOWS_APART", frozenset())
    with pytest.raises(UnsupportedError, match="its layers have keys and values of different shapes"):
        LayeredModel(str(path))
