"""Create the quantiser that a config selects."""

from __future__ import annotations

from pathlib import Path

from sgl_kvfetch.config import KVFetchConfig
from sgl_kvfetch.quant.base import Quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import load_profile
from sgl_kvfetch.quant.registry import make_quantiser


def config_quantiser(config: KVFetchConfig) -> Quantiser:
    """Create the quantiser. Raises ConfigError if the profile cannot be read or does not reach the target."""
    if config.quantiser_name != "klt":
        return make_quantiser(config.quantiser_name, config.cachegen_k_bins, config.cachegen_v_bins)
    assert config.profile is not None
    return KltQuantiser(load_profile(Path(config.profile)), config.target_kl)
