"""The quantiser that a config asks for.

A module of its own, because the engine imports it before SGLang serves, when nothing may be counted yet: see `metrics`.
"""

from __future__ import annotations

from pathlib import Path

from sgl_kvfetch.codec import KltQuantiser, Quantiser, load_profile, make_quantiser
from sgl_kvfetch.plane.config import CacheGenConfig, KVFetchConfig


def config_quantiser(config: KVFetchConfig) -> Quantiser:
    """Create the quantiser of a config. Raises ConfigError for a profile that is unreadable or misses the target."""
    if config.quantiser_name != "klt":
        bins = config.cachegen or CacheGenConfig()
        return make_quantiser(config.quantiser_name, bins.k_bins, bins.v_bins)
    assert config.profile is not None
    return KltQuantiser(load_profile(Path(config.profile)), config.finest_kl)
