"""The namespace of the engine that we are in."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.fingerprint import fingerprint_model
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.types import KVGeometry


def engine_namespace(
    config: KVFetchConfig, quantiser: Quantiser, storage_config: Any, geometry: KVGeometry, first_layer: int
) -> Namespace:
    """What distinguishes this rank's KV cache from all that it must not be confused with.

    Reads the weights of the model unless ``model_id`` is set. Raises UnsupportedError where nothing tells them from
    others.
    """
    from sglang.srt.runtime_context import get_model

    model = get_model()
    if config.model_id is not None:
        name = f"id:{config.model_id}"
    elif model.load_format == "dummy":
        raise UnsupportedError("--load-format dummy has random weights; set model_id in the kvfetch config")
    else:
        name = f"weights:{fingerprint_model(model.model_path, model.revision)}"
    return Namespace(
        model=name,
        model_dtype=_model_dtype(model),
        attention="mha",
        kv_dtype=geometry.dtype,
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        first_layer=first_layer,
        num_heads=geometry.num_heads,
        k_head_dim=geometry.k_head_dim,
        v_head_dim=geometry.v_head_dim,
        head_slice=f"{storage_config.tp_rank}/{storage_config.tp_size}",
        quantiser=quantiser.identity,
    )


def _model_dtype(model: Any) -> str:
    """The dtype the model computes in, with everything on the command line that changes its values."""
    overrides = json.loads(model.json_model_override_args or "{}")
    parts = [f"dtype={model.dtype}", f"quantization={model.quantization}"]
    if overrides:
        digest = hashlib.sha256(json.dumps(overrides, sort_keys=True).encode()).hexdigest()[:16]
        parts.append(f"overrides={digest}")
    return ";".join(parts)
