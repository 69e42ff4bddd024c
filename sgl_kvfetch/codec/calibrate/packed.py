"""Restore weights that AutoAWQ, AutoGPTQ and GPTQModel have packed in a few bits.

transformers loads such checkpoints only with CUDA kernels that others make. Calibrating needs no kernels, just the
weights that they compute with:

    w = (q - zero) * scale,

with one ``zero`` and one ``scale`` for each output and each group of inputs. So each packed layer gets a plain weight
here, and transformers loads a plain checkpoint. A linear layer of ``in`` inputs and ``out`` outputs has these tensors:

    name       AWQ ("gemm")               GPTQ                        holds
    qweight    (in, out * bits / 32)      (in * bits / 32, out)       q
    qzeros     (groups, out * bits / 32)  (groups, out * bits / 32)   zero, in the first format of GPTQ less 1
    scales     (groups, out)              (groups, out)               scale, float16 or bfloat16
    g_idx                                 (in,)                       the group of each input; with "act-order"
                                                                      (``desc_act``), groups are no runs of inputs

``qweight`` and ``qzeros`` are int32, and hold 32 / bits values each. The first value is in the lowest bits. Of 3 bits,
32 values are in three int32, end to end. AWQ shuffles the eight values of an int32, as its kernel wants them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvfetch.errors import ConfigError, UnsupportedError

_PARTS = frozenset({"qweight", "qzeros", "scales", "g_idx"})
_AWQ_BITS = (4,)
_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]  # of the outputs in an int32: the second is in the bits 16 to 19


@dataclass(frozen=True)
class Packing:
    """How the checkpoint at ``path`` packs its linear layers. ``zero_offset`` is added to the zeros that it has."""

    path: str
    is_awq: bool
    zero_offset: int = 0

    def plain(self, tensors: dict[str, Any]) -> dict[str, Any]:
        """Return slices of tensors, as safetensors gives them, with one ``weight`` for the parts of a packed layer.

        Raises ConfigError for parts that are missing or do not fit each other, UnsupportedError for the bits.
        """
        found: dict[str, Any] = {}
        packed: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, tensor in tensors.items():
            linear, _, part = name.rpartition(".")
            if part in _PARTS:
                packed[linear][part] = tensor
            else:
                found[name] = tensor
        for linear, parts in packed.items():
            found[f"{linear}.weight"] = PackedWeight(self, linear, parts)
        return found


class PackedWeight:
    """The weight of a packed layer, as a slice: it is restored when it is read."""

    def __init__(self, packing: Packing, linear: str, parts: dict[str, Any]) -> None:
        """Compare the shapes of the packed parts with each other. Raises ConfigError, and UnsupportedError for other
        forms."""
        name = f"{packing.path}: {linear}"
        for part in ("qweight", "qzeros", "scales"):
            if part not in parts:
                raise ConfigError(f"{packing.path}: the checkpoint lacks {linear}.{part}")
        self._packing, self._parts = packing, parts
        shapes = {part: tuple(x.get_shape()) for part, x in parts.items()}
        rows, (groups, outputs), packed_outputs = shapes["qweight"][0], shapes["scales"], shapes["qzeros"][1]
        # The config has one number for all layers, and GPTQModel may choose another one for some.
        self._bits = 32 * packed_outputs // outputs
        known = _AWQ_BITS if packing.is_awq else _GPTQ_BITS
        if self._bits not in known:
            raise UnsupportedError(f"{name} has {self._bits} bits a weight, expected {' or '.join(map(str, known))}")
        if (dtype := parts["qweight"].get_dtype()) != "I32":
            raise UnsupportedError(f"{name}.qweight is of the type {dtype}, expected I32")
        self._inputs = rows if packing.is_awq else rows * 32 // self._bits
        expected = {
            "qweight": (rows, packed_outputs if packing.is_awq else outputs),
            "qzeros": (groups, packed_outputs),
            "scales": (groups, outputs),
            "g_idx": (self._inputs,),
        }
        for part, shape in shapes.items():
            if shape != expected[part]:
                raise ConfigError(f"{name}.{part} has the shape {shape}, expected {expected[part]}")

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the weight, float32 ``(out, in)``, or a part of it."""
        qweight, qzeros, scales = (self._parts[part][...] for part in ("qweight", "qzeros", "scales"))
        zeros = _unpacked(qzeros.T, self._bits)
        if self._packing.is_awq:
            q, zeros = (_in_order(x) for x in (_unpacked(qweight.T, self._bits), zeros))
        else:
            q = _unpacked(qweight, self._bits).T.contiguous()
        # The sum may be 16 with 4 bits: SGLang's kernels do not wrap it around either.
        zeros, scales = zeros.short() + self._packing.zero_offset, scales.T
        groups = scales.shape[1]
        weight = q.float()
        group = self._parts["g_idx"][...].long() if "g_idx" in self._parts else None
        if group is None or torch.equal(group, torch.arange(self._inputs) * groups // self._inputs):
            weight.view(len(q), groups, -1).sub_(zeros[:, :, None]).mul_(scales[:, :, None])
        else:  # act-order
            weight.sub_(zeros[:, group]).mul_(scales[:, group])
        return weight[index]


def take_packing(path: str, config: Any) -> Packing | None:
    """Return how a checkpoint is packed, and make its transformers config that of a plain one.

    Return None, and leave the config alone, if neither AWQ nor GPTQ packed it. Raises UnsupportedError for a layout
    that is not known.
    """
    quantization: Any = getattr(config, "quantization_config", None)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method not in ("awq", "gptq"):
        return None
    default, known = ("gemm", ("gemm",)) if method == "awq" else ("gptq", ("gptq", "gptq_v2"))
    layout = "marlin" if quantization.get("is_marlin_format") else quantization.get("checkpoint_format")
    layout = str(layout or quantization.get("version") or default).lower()
    if layout not in known:
        raise UnsupportedError(f"{path}: weights by {method} in the layout {layout!r}, expected {' or '.join(known)}")
    del config.quantization_config
    return Packing(path, is_awq=method == "awq", zero_offset=int(layout == "gptq"))


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the integers, uint8 ``(n * 32 / bits, m)``, that are packed along the first axis of int32 ``(n, m)``."""
    run_words = bits // math.gcd(bits, 32)  # the shortest run of words that whole values fill
    run_values = run_words * 32 // bits
    runs = words.contiguous().view(-1, run_words, words.shape[1])
    found = torch.empty(len(runs), run_values, words.shape[1], dtype=torch.uint8)
    for i in range(run_values):
        word, shift = divmod(i * bits, 32)
        value = runs[:, word] >> shift
        if (own := 32 - shift) < bits:  # the others are the first of the next word
            value = (value & (1 << own) - 1) | (runs[:, word + 1] << own)
        found[:, i] = value & (1 << bits) - 1
    return found.flatten(0, 1)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Undo AWQ's shuffle along the first axis."""
    return x.reshape(-1, 8, x.shape[1])[:, _AWQ_PLACES].flatten(0, 1)
