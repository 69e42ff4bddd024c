"""Checkpoints as AutoAWQ, AutoGPTQ and GPTQModel pack them give the weights that they stand for, bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from tests.codec.calibrate.test_layers import MIXTURE, make

GROUP = 32  # inputs


@dataclass(frozen=True)
class Format:
    """What a checkpoint's config says, and what its tensors are like. ``zero_offset``: what is taken off zeros."""

    config: dict[str, Any]
    bits: int = 4
    zero_offset: int = 0
    orders_by_activation: bool = False

    @property
    def is_awq(self) -> bool:
        return bool(self.config["quant_method"] == "awq")


AWQ = Format({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"})
# AutoGPTQ does not name the format, or as GPTQModel does.
GPTQ = Format({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}, zero_offset=1)
V2 = {"checkpoint_format": "gptq_v2"}


def pack_checkpoint(path: Path, fmt: Format, *, packs_head: bool = False) -> Path:
    """Pack the projections of a plain checkpoint, whose weights are replaced by what is packed; return the copy."""
    packed = shutil.copytree(path, path.with_name("packed"))
    tensors = load_file(path / "model.safetensors")
    stored = dict(tensors)
    rng = np.random.default_rng(0)
    for name, weight in tensors.items():
        if name.endswith("proj.weight") or (packs_head and name == "lm_head.weight"):
            outputs, inputs = weight.shape
            parts, plain = random_linear(rng, outputs, inputs, fmt)
            tensors[name] = plain
            del stored[name]
            stored |= {name.removesuffix("weight") + part: x for part, x in parts.items()}
    assert len(stored) > len(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    set_quantization(packed, fmt.config)
    return packed


def set_quantization(path: Path, quantization: dict[str, Any] | None) -> None:
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)
    changes = {} if quantization is None else {"quantization_config": quantization}
    (path / "config.json").write_text(json.dumps(config | changes))


def random_linear(
    rng: np.random.Generator, outputs: int, inputs: int, fmt: Format
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a packed layer, and its weight, float32 ``(outputs, inputs)``."""
    num_groups = inputs // GROUP
    q = rng.integers(0, 1 << fmt.bits, (outputs, inputs))
    zeros = rng.integers(fmt.zero_offset, 1 << fmt.bits, (num_groups, outputs))
    scales = torch.from_numpy(rng.uniform(0.001, 0.02, (num_groups, outputs))).half()
    group = np.arange(inputs) // GROUP
    if fmt.orders_by_activation:
        group = rng.permutation(group)
    weight = (torch.from_numpy(q) - torch.from_numpy(zeros.T[:, group])).float() * scales.T[:, group].float()
    if fmt.is_awq:
        qweight, qzeros = (pack(shuffle(x), 4) for x in (q.T, zeros))
        return {"qweight": qweight, "qzeros": qzeros, "scales": scales}, weight
    qweight = pack(q, fmt.bits).T.contiguous()
    qzeros = pack(zeros - fmt.zero_offset, fmt.bits)
    g_idx = torch.from_numpy(group).int()
    return {"qweight": qweight, "qzeros": qzeros, "scales": scales, "g_idx": g_idx}, weight


def pack(values: NDArray[np.int64], bits: int) -> torch.Tensor:
    """Return the integers of each row, end to end, as int32."""
    ones = (values[..., None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(values), -1)
    return torch.from_numpy(np.packbits(ones, axis=1, bitorder="little").view(np.int32))


def shuffle(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reorder columns as AutoAWQ's ``WQLinear_GEMM.from_linear`` does, before it packs them."""
    eights = values.reshape(len(values), -1, 8)
    return eights[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(values.shape)


@pytest.mark.parametrize(
    ("fmt", "model_type", "changes"),
    [
        pytest.param(AWQ, "qwen3_moe", MIXTURE, id="awq-experts"),
        pytest.param(GPTQ, "llama", {}, id="gptq"),
        pytest.param(Format(GPTQ.config | V2, orders_by_activation=True), "llama", {}, id="gptq-v2-act-order"),
        pytest.param(Format(GPTQ.config | {"bits": 8}, bits=8, zero_offset=1), "llama", {}, id="gptq-8-bits"),
        pytest.param(Format(GPTQ.config | {"bits": 3} | V2, bits=3), "llama", {}, id="gptq-3-bits"),
    ],
)
def test_weights_are_restored(tmp_path: Path, fmt: Format, model_type: str, changes: dict[str, Any]) -> None:
    path = make(tmp_path / "plain", model_type, num_hidden_layers=2, **changes)
    packed = LayeredModel(str(pack_checkpoint(path, fmt, packs_head=not fmt.is_awq)))
    plain = LayeredModel(str(path))
    for index in range(2):
        with plain.layer(index), packed.layer(index):
            expected = dict(plain._layers[index].named_parameters())
            found = dict(packed._layers[index].named_parameters())
            assert found.keys() == expected.keys()
            for name, weight in found.items():
                assert weight.dtype == torch.float32
                assert torch.equal(weight, expected[name]), name
    assert torch.equal(packed._model.lm_head.weight, plain._model.lm_head.weight)


Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (AWQ.config | {"version": "gemv"}, {}, "weights by awq in the layout 'gemv', expected gemm"),
        (GPTQ.config | {"is_marlin_format": True}, {}, "by gptq in the layout 'marlin', expected gptq or gptq_v2"),
        (AWQ.config, {}, r"proj has 8 bits a weight, expected 4"),
        (GPTQ.config, {"g_idx": torch.zeros(3)}, rf"{Q_PROJ}\.g_idx has the shape \(3,\), expected \(64,\)"),
        (GPTQ.config, {"scales": None}, rf"the checkpoint lacks {Q_PROJ}\.scales"),
        (None, {}, r"the checkpoint lacks self_attn\.q_proj\.weight of layer 0"),
    ],
)
def test_what_cannot_be_restored_is_named(
    tmp_path: Path, config: dict[str, Any] | None, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    path = make(tmp_path / "plain", "llama", num_hidden_layers=1)
    packed = pack_checkpoint(path, Format(GPTQ.config, bits=8))
    set_quantization(packed, config)
    changed = load_file(packed / "model.safetensors") | {f"{Q_PROJ}.{name}": x for name, x in tensors.items()}
    stored = {name: x for name, x in changed.items() if x is not None}
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises((ConfigError, UnsupportedError), match=message):
        LayeredModel(str(packed))
