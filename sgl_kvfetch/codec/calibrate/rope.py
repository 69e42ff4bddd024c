"""Find the rotation that a model applies to its keys."""

from __future__ import annotations

from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.quant.rope import Rope, unrotate
from sgl_kvfetch.errors import UnsupportedError

# A share of a key's length. On SmolLM2-135M, rounding to bfloat16 errs by at most 0.003, wrong pairs by 0.15 or more.
_MOST_ROPE_ERROR = 0.05

# SGLang and transformers compute these alike, and others, such as "dynamic", differently.
_SAME_IN_SGLANG = ("default", "linear", "llama3", "yarn")


def rope_or_note(model: LayeredModel) -> tuple[Rope | None, tuple[str, ...]]:
    """Return a model's rotation, or None and a note for its profile that says why it was not found."""
    try:
        return find_rope(model), ()
    except UnsupportedError as e:
        return None, (f"K stays rotated, which costs bits: {e}",)


def find_rope(model: LayeredModel) -> Rope:
    """Return the rotation that a model applies to K last, alike in all layers and heads.

    Keys of one repeated token differ by their rotation alone (``model.probe``). So the right rotation is the one
    without which all these keys are equal. A factor of the rotation, such as YaRN's, is not told apart from the keys
    themselves, and need not be.

    Raises UnsupportedError if the model's frequencies do not explain its keys, or if SGLang rotates differently.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _SAME_IN_SGLANG:
        raise UnsupportedError(f"rope type {rope_type!r} is not known; known are {', '.join(_SAME_IN_SGLANG)}")
    k = model.probe
    lengths = k[:1].norm(dim=-1)
    for frequencies in model.inverse_frequencies():
        if 2 * len(frequencies) > k.shape[-1]:
            continue
        for interleaved in (False, True):
            rope = Rope(inv_freq=tuple(frequencies.float().tolist()), interleaved=interleaved)
            plain = unrotate(k, rope.table(0, len(k), k.device), rope)
            if bool(((plain - plain[:1]).norm(dim=-1) < _MOST_ROPE_ERROR * lengths).all()):
                return rope
    raise UnsupportedError("no rotation by the model's frequencies explains its keys in all layers")
