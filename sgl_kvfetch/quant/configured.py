"""The quantiser that a config asks for."""

from __future__ import annotations

from pathlib import Path

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.quant.base import Quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import load_profile
from sgl_kvfetch.quant.registry import make_quantiser


def config_quantiser(config: KVFetchConfig) -> Quantiser:
    """Raises ConfigError for a profile that cannot be read, or does not have the target."""
    if config.quantiser_name != "klt":
        return make_quantiser(config.quantiser_name, config.cachegen_k_bins, config.cachegen_v_bins)
    assert config.profile is not None
    return KltQuantiser(load_profile(Path(config.profile)), config.target_kl)
