"""Find the rotary position embedding of a model in its own keys."""

from __future__ import annotations

import torch

from sgl_kvfetch.codec.calibrate.model import KVModel
from sgl_kvfetch.codec.quant.rope import Rope, unrotate
from sgl_kvfetch.errors import UnsupportedError

_NUM_TOKENS = 64

# Of a key's length. On SmolLM2-135M, rounding to bfloat16 errs by at most 0.003, the wrong pairs by 0.15 or more.
_MOST_ERROR = 0.05

# SGLang and transformers compute these alike. Of others, such as "dynamic", they do not.
_SAME_IN_SGLANG = ("default", "linear", "llama3", "yarn")


def find_rope(model: KVModel) -> Rope:
    """Return the rotation that a model applies to K last, alike in all layers and heads.

    Keys of one repeated token differ by their rotation alone: attention adds the same to each, since all values are
    equal. So the right rotation is the one without which all these keys are equal. A factor of the rotation, such as
    YaRN's, is not told apart from the keys themselves, and need not be.

    Raises UnsupportedError if the model's frequencies do not explain its keys, or if SGLang rotates differently.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _SAME_IN_SGLANG:
        raise UnsupportedError(f"rope type {rope_type!r} is not known; known are {', '.join(_SAME_IN_SGLANG)}")
    k = model.kv(torch.full((_NUM_TOKENS,), model.config.vocab_size // 2))[0].float().cpu()
    lengths = k[:1].norm(dim=-1)
    for frequencies in model.inverse_frequencies():
        if 2 * len(frequencies) > k.shape[-1]:
            continue
        for interleaved in (False, True):
            rope = Rope(inv_freq=tuple(frequencies.float().tolist()), interleaved=interleaved)
            plain = unrotate(k, rope.table(0, _NUM_TOKENS, k.device), rope)
            if bool(((plain - plain[:1]).norm(dim=-1) < _MOST_ERROR * lengths).all()):
                return rope
    raise UnsupportedError("no rotation by the model's frequencies explains its keys in all layers")
