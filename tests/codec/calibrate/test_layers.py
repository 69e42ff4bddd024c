"""A layer at a time, models compute what transformers computes with all of them."""

from __future__ import annotations

import json
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.codec.kv_model import KVModel
from harness.models import make_tiny_deepseek
from sgl_kvfetch.codec.calibrate.layers import KV, LayeredModel
from sgl_kvfetch.errors import ConfigError, UnsupportedError

SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def make(tokenizer_files: Path, path: Path, model_type: str, **changes: Any) -> Path:
    shutil.copytree(tokenizer_files, path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SHAPE | changes)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("qwen3_moe", MIXTURE),  # the checkpoint has the experts one by one
        ("gemma2", {"sliding_window": 16}),  # scaled embeddings, tied to the output, soft caps
        ("mistral", {"sliding_window": 16}),
        ("phi", {}),  # attention and MLP side by side; biases
        ("cohere", {}),
        ("gpt_neox", {}),  # its layers return tuples, and know the cache by another name
        ("bloom", {"n_head": 4}),
        ("deepseek_v3", {}),
    ],
)
def test_layers_compute_what_the_whole_model_does(
    tokenizer_files: Path, tmp_path: Path, model_type: str, changes: dict[str, Any]
) -> None:
    path = tmp_path / "model"
    if model_type == "deepseek_v3":
        make_tiny_deepseek(path)
    else:
        make(tokenizer_files, path, model_type, **changes)
    ids = torch.randint(3, 256, (60,), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        expected = torch.log_softmax(whole(ids[None]).logits[0].float(), -1)
    model = LayeredModel(str(path))
    hidden, calls = model.embed(ids), model.calls(60)
    after, after_calls = hidden[40:], model.calls(20, 40)
    for index in range(model.num_layers):
        with model.layer(index) as layer, torch.no_grad():
            hidden, kv = layer.forward(hidden, calls)
            after = layer.after(after, after_calls, KV(kv.k[:40], kv.v[:40]))
        assert kv.k.shape == (60, model.num_heads, model.k_head_dim)
        assert kv.v.shape == (60, model.num_heads, model.v_head_dim)
    torch.testing.assert_close(model.log_probabilities(hidden), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.log_probabilities(after), expected[40:], rtol=1e-4, atol=1e-4)


def test_weights_in_fp8_are_restored(tokenizer_files: Path, tmp_path: Path) -> None:
    """As checkpoints have them: a scale a block of 128 x 128."""
    pytest.importorskip("accelerate", reason="transformers needs it for FP8")
    path = make(tokenizer_files, tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
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


def test_weights_packed_by_llm_compressor_are_restored(tokenizer_files: Path, tmp_path: Path) -> None:
    """Which is how it stores what it has made with GPTQ or AWQ: four bits, a scale for 128 weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    path = make(tokenizer_files, tmp_path / "model", "llama", hidden_size=128, intermediate_size=256)
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


def test_latent_vectors_are_as_in_a_cache(tmp_path: Path) -> None:
    path = make_tiny_deepseek(tmp_path)
    ids = torch.arange(3, 40)
    k, v = KVModel(str(path)).kv(ids)
    model = LayeredModel(str(path))
    with model.layer(0) as layer:
        kv = layer.forward(model.embed(ids), model.calls(len(ids)))[1]
    torch.testing.assert_close(kv.k, k[:, 0])
    torch.testing.assert_close(kv.v, v[:, 0])


def test_one_layer_at_a_time_is_in_memory(tokenizer_files: Path, tmp_path: Path) -> None:
    model = LayeredModel(str(make(tokenizer_files, tmp_path / "model", "llama")))

    def loaded() -> list[int]:
        layers = model._model.model.layers
        return [i for i, layer in enumerate(layers) if any(not p.is_meta for p in layer.parameters())]

    assert loaded() == []
    with model.layer(1) as layer:
        assert loaded() == [1]
        weights = [weakref.ref(p) for p in model._model.model.layers[1].parameters()]
    assert loaded() == []
    assert all(weight() is None for weight in weights), f"layer {layer.index} still has its weights"


def test_weights_in_bfloat16_are_computed_with_in_float32(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make(tokenizer_files, tmp_path / "model", "llama")
    AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).save_pretrained(path)
    model = LayeredModel(str(path))
    embeddings = model._model.get_input_embeddings().weight, model._model.get_output_embeddings().weight
    assert [w.dtype for w in embeddings] == [torch.bfloat16] * 2  # they may be most of the memory
    ids = torch.arange(3, 40)
    hidden, calls = model.embed(ids), model.calls(len(ids))
    assert hidden.dtype == torch.float32
    with model.layer(0) as layer:
        assert {p.dtype for p in model._model.model.layers[0].parameters()} == {torch.float32}
        hidden, kv = layer.forward(hidden, calls)
    assert hidden.dtype == kv.k.dtype == model.log_probabilities(hidden).dtype == torch.float32


def test_what_is_no_model_is_named(tokenizer_files: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"no model with a tokenizer at '{tmp_path}'"):
        LayeredModel(str(tmp_path))
    path = tmp_path / "model"
    shutil.copytree(tokenizer_files, path)
    (path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no model with a tokenizer"):
        LayeredModel(str(path))


def test_a_damaged_checkpoint_is_named(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make(tokenizer_files, tmp_path / "model", "llama")
    file = path / "model.safetensors"
    tensors = load_file(file)
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    model = LayeredModel(str(path))
    with pytest.raises(ConfigError, match=r"the checkpoint lacks mlp\.up_proj\.weight of layer 1"), model.layer(1):
        pass
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": lost[:5]}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj\.weight has the shape \(5, 64\), expected \(64, 64\)"):
        LayeredModel(str(path))._load(1, lambda name: True)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        LayeredModel(str(path))


def test_layers_without_plain_keys_and_values_are_refused(tokenizer_files: Path, tmp_path: Path) -> None:
    path = make(tokenizer_files, tmp_path / "model", "mamba", state_size=16)
    with pytest.raises(UnsupportedError, match="keys and values of plain attention"):
        LayeredModel(str(path))
    assert json.loads((path / "config.json").read_text())["model_type"] == "mamba"
