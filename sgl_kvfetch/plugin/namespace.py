"""The namespace of this process's engine."""

from __future__ import annotations

from typing import Any

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.fingerprint import fingerprint_model
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plugin.compute_flags import compute_flags
from sgl_kvfetch.plugin.quantiser import rank_heads
from sgl_kvfetch.plugin.weight_updates import require_known_weights
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.types import KVGeometry

# Load formats whose weights do not come from the model's files.
_ELSEWHERE = {
    "dummy": "has random weights",
    "remote": "takes the weights from elsewhere",
    "remote_instance": "takes the weights from another server",
}
LORA_NEEDS_MODEL_ID = (
    "LoRA needs model_id in the kvfetch config: SGLang identifies adapters by their names and paths, so an adapter "
    "that is trained again in the same place would get the KV cache of the old one. Change model_id whenever you "
    "change an adapter"
)


def engine_heads(
    config: KVFetchConfig, quantiser: Quantiser, storage_config: Any, geometry: KVGeometry, first_layer: int
) -> HeadSlice:
    """Return the namespace and heads that distinguish this rank's KV cache from all others.

    Reads the weights of the model unless ``model_id`` is set. Raises UnsupportedError if nothing identifies the
    weights, or if ``model_id`` is the name of weights that the server had before.
    """
    require_known_weights(config.model_id)
    name = f"id:{config.model_id}" if config.model_id is not None else f"weights:{_weights_digest()}"
    num_heads = geometry.num_heads * storage_config.tp_size  # counts a head again if several ranks have it
    if isinstance(quantiser, KltQuantiser):
        num_heads = quantiser.profile.grid.num_heads
    namespace = Namespace(
        model=name,
        model_dtype=compute_flags(),
        attention="mha",
        kv_dtype=geometry.dtype,
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        first_layer=first_layer,
        num_heads=num_heads,
        k_head_dim=geometry.k_head_dim,
        v_head_dim=geometry.v_head_dim,
        quantiser=quantiser.identity,
    )
    return HeadSlice(namespace, rank_heads(storage_config, geometry, num_heads))


def _weights_digest() -> str:
    """Return the fingerprint of the loaded weights. Raises UnsupportedError if the model's files do not give it."""
    from sglang.srt.runtime_context import get_lora, get_model

    model = get_model()
    if get_lora().enable_lora:
        raise UnsupportedError(LORA_NEEDS_MODEL_ID)
    if model.load_format in _ELSEWHERE:
        raise UnsupportedError(
            f"--load-format {model.load_format} {_ELSEWHERE[model.load_format]}; set model_id in the kvfetch config"
        )
    if model.weight_cache_mode == "client":
        raise UnsupportedError(
            "--weight-cache-mode client takes the weights from a daemon; set model_id in the kvfetch config"
        )
    return fingerprint_model(model.model_path, model.revision)
