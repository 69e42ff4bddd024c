"""The quantiser that the config selects for this process's engine."""

from __future__ import annotations

import logging
from typing import Any

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.quant import Quantiser
from sgl_kvfetch.quant.configured import config_quantiser
from sgl_kvfetch.quant.klt import KltQuantiser, require_grid
from sgl_kvfetch.quant.profile import Profile
from sgl_kvfetch.types import TENSORS, KVGeometry

logger = logging.getLogger(__name__)


def engine_quantiser(config: KVFetchConfig, storage_config: Any, geometry: KVGeometry, first_layer: int) -> Quantiser:
    """Raises ConfigError for a profile of another model, UnsupportedError for a KV cache that klt does not support."""
    if config.quantiser_name == "klt" and geometry.torch_dtype.itemsize == 1:
        raise UnsupportedError(f"quantiser 'klt' does not support a KV cache of {geometry.dtype}; use 'exact'")
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
