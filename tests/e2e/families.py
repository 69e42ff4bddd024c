"""More families of models, each from calibration to hits in both modes: ``pytest tests/e2e/families.py``.

The suite does not run them, since each starts three servers. The last four need SGLang's Triton backend in Triton's
interpreter, which takes minutes: `torch_native` is refused for them, or has no learned sinks.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from harness.models import OTHER_FAMILIES, make_tiny
from harness.store_process import StoreProcess
from tests.e2e import test_families
from tests.e2e.continuation import calibrated, goes_on_in_both_modes, started

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SEEN = ("granitemoehybrid", "kimi_linear", "nemotron_h", "olmo3", "phi3", "qwen3_next")
IN_TRITON = ("exaone4", "gemma4_text", "gpt_oss", "mimo_v2_flash")


@pytest.mark.parametrize("family", [*SEEN, *IN_TRITON])
def test_a_family_goes_on_from_what_klt_restores(family: str, store: StoreProcess, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", family, OTHER_FAMILIES[family])
    flags, env, num_tokens, num_compared = [], {}, 256, None
    if family in IN_TRITON:
        flags, env, num_tokens = ["--attention-backend", "triton"], {"TRITON_INTERPRET": "1"}, 128
        num_compared = 1  # there, the tokens that follow see one token less than the window
    if family == "mimo_v2_flash":
        # Transformers writes a rotation for each kind of layer, and SGLang takes that for one.
        flags += ["--json-model-override-args", '{"rope_scaling": null}']
    profile = calibrated(model)
    if any(layer.pool == "state" for layer in profile.layers.layers):
        flags = ["--max-mamba-cache-size", "64"]
        env = {"TRITON_INTERPRET": "1", "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    serve = started(model, store, flags, env)
    goes_on_in_both_modes(model, profile, serve, num_tokens=num_tokens, num_compared=num_compared)


FALCON_H1 = {
    "head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 16,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "mamba_rms_norm": True,
}


@pytest.mark.parametrize("mode", ["host", "device"])
def test_attention_and_a_state_in_each_layer(mode: str, store: StoreProcess, tmp_path: Path) -> None:
    """There is no ``klt`` for them."""
    make = partial(make_tiny, family="falcon_h1", changes=FALCON_H1)
    env = {"TRITON_INTERPRET": "1"}
    test_families.test_a_conversation_goes_on_from_stored_states_after_a_restart(make, 16, env, mode, tmp_path, store)
