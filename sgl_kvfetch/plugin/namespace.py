"""The quantiser and the namespace of this process's engine."""

from __future__ import annotations

import logging
from typing import Any

from sgl_kvfetch.codec import KltQuantiser, Profile, Quantiser, fingerprint_model, require_grid
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.keys import HeadSlice, Namespace
from sgl_kvfetch.plane import KVFetchConfig, config_quantiser
from sgl_kvfetch.plugin.compute_flags import compute_flags, draft_flags
from sgl_kvfetch.plugin.weight_updates import require_known_weights
from sgl_kvfetch.types import TENSORS, KVGeometry

logger = logging.getLogger(__name__)

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


def engine_quantiser(config: KVFetchConfig, storage_config: Any, geometry: KVGeometry, first_layer: int) -> Quantiser:
    """Raises ConfigError for a profile of another model."""
    quantiser = config_quantiser(config)
    if not isinstance(quantiser, KltQuantiser):
        return quantiser
    assert config.profile is not None
    profile = quantiser.profile
    _require_same_shape(config.profile, profile, geometry, first_layer, storage_config.tp_size)
    heads = rank_heads(storage_config, geometry, profile.grid.num_heads)
    require_grid(profile, first_layer, geometry.num_layers, heads.start, len(heads))
    if profile.rope is None:
        logger.warning(
            "kvfetch: profile %s keeps RoPE in K, which makes files larger: see the calibration's notes", config.profile
        )
    return quantiser


def rank_heads(storage_config: Any, geometry: KVGeometry, total: int) -> range:
    """Return the range of this rank's heads among the model's ``total`` heads."""
    # With more ranks than heads, neighbouring ranks have the same head.
    first = storage_config.tp_rank * total // storage_config.tp_size
    return range(first, first + geometry.num_heads)


def require_own_profile(config: KVFetchConfig, quantiser: Quantiser, namespace: Namespace) -> None:
    """Raise ConfigError for a profile that was calibrated for other weights. With ``model_id``, do not check."""
    if config.model_id is not None or not isinstance(quantiser, KltQuantiser):
        return
    calibrated = quantiser.profile.calibration.weights
    if namespace.model != f"weights:{calibrated}":
        raise ConfigError(
            f"profile {config.profile} was calibrated for {quantiser.profile.calibration.model!r} with weights "
            f"{calibrated}, but the engine has {namespace.model.removeprefix('weights:')}; calibrate a profile for "
            "these weights, or set model_id to use this one anyway"
        )


def _require_same_shape(path: str, profile: Profile, geometry: KVGeometry, first_layer: int, ranks: int) -> None:
    end_layer = first_layer + geometry.num_layers
    expected = {
        "KV heads a rank": (max(1, profile.grid.num_heads // ranks), geometry.num_heads),
        **{f"values a head of {t.upper()}": (profile.head_dim(t), geometry.head_dim(t)) for t in TENSORS},
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise ConfigError(f"profile {path} is for another model: it has {found} {what}, the engine has {wanted}")
    if profile.grid.num_layers < end_layer:
        raise ConfigError(
            f"profile {path} is for another model: it has {profile.grid.num_layers} layers, the engine has "
            f"{end_layer} or more"
        )


def engine_heads(
    config: KVFetchConfig,
    quantiser: Quantiser,
    storage_config: Any,
    geometry: KVGeometry,
    first_layer: int,
    side_pools: str = "",
) -> HeadSlice:
    """Return the namespace and heads that distinguish this rank's KV cache from all others. ``side_pools``: what
    identifies the pages of the rank's side pools.

    Reads the weights of the model unless ``model_id`` is set. Raises UnsupportedError if nothing identifies the
    weights, or if ``model_id`` is the name of weights that the server had before.
    """
    require_known_weights(config.model_id)
    name = f"id:{config.model_id}" if config.model_id is not None else f"weights:{_weights_digest()}"
    num_heads = 1 if storage_config.is_mla_model else _model_heads(geometry.num_heads, storage_config.tp_size)
    namespace = Namespace(
        model=name,
        model_dtype=compute_flags(),
        attention=("mla" if storage_config.is_mla_model else "mha") + (side_pools and f" with {side_pools}"),
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


def _model_heads(rank_heads: int, tp_size: int) -> int:
    """Return the number of the model's KV heads."""
    if rank_heads > 1 or tp_size == 1:
        return rank_heads * tp_size
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    # With more ranks than heads, several ranks have the same one.
    model_heads: int = ModelConfig.from_server_args(get_server_args()).get_total_num_kv_heads()
    return min(tp_size, model_heads)


def _weights_digest() -> str:
    """Return the fingerprint of the loaded weights. Raises UnsupportedError if the model's files do not give it."""
    from sglang.srt.runtime_context import get_lora, get_model

    model = get_model()
    if get_lora().enable_lora:
        raise UnsupportedError(LORA_NEEDS_MODEL_ID)
    _require_own_files("--load-format", model.load_format)
    if model.weight_cache_mode == "client":
        raise UnsupportedError(
            "--weight-cache-mode client takes the weights from a daemon; set model_id in the kvfetch config"
        )
    return fingerprint_model(model.model_path, model.revision)


def draft_model(config: KVFetchConfig) -> str:
    """Return what identifies the draft model and how it computes its KV cache.

    Reads its weights unless ``model_id`` is set, which names them, too. Raises UnsupportedError if nothing identifies
    them.
    """
    from sglang.srt.runtime_context import get_model, get_spec

    model, draft = get_model(), get_spec()
    if config.model_id is not None:
        return draft_flags()
    _require_own_files("--speculative-draft-load-format", draft.speculative_draft_load_format or model.load_format)
    if draft.speculative_draft_model_path is None:  # its layers are among the model's weights
        return draft_flags()
    weights = fingerprint_model(draft.speculative_draft_model_path, draft.speculative_draft_model_revision)
    return f"weights:{weights};{draft_flags()}"


def _require_own_files(flag: str, load_format: str) -> None:
    if load_format in _ELSEWHERE:
        raise UnsupportedError(f"{flag} {load_format} {_ELSEWHERE[load_format]}; set model_id in the kvfetch config")
