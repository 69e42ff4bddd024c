"""Tests which quantiser an engine gets, and which profiles it refuses."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt import runtime_context

from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.layer_map import LayerMap, ModelLayer, Pool
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plugin import identity, starting
from sgl_kvfetch.plugin.identity import engine_quantiser, pool_layers, require_own_profile
from sgl_kvfetch.protocol.config import KVFetchConfig, parse_config
from sgl_kvfetch.protocol.messages import ProfileNeeds, Watch
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile
from tests.plugin.backends import Make
from tests.segments import make_heads

GEOMETRY = KVGeometry(num_layers=3, num_heads=4, k_head_dim=16, v_head_dim=16, page_size=4, dtype="bfloat16")


@pytest.fixture
def config(tmp_path: Path) -> KVFetchConfig:
    make_profile(cell_heads=2).save(tmp_path / "p")
    return parse_config({"store": "http://nowhere", "profile": str(tmp_path / "p")})


def rank(index: int = 0, of: int = 1) -> SimpleNamespace:
    return SimpleNamespace(tp_rank=index, tp_size=of)


@pytest.fixture(autouse=True)
def in_the_pool(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...] | None]:
    """The last of these are the layers that SGLang has in its pool; None if it has all."""
    layers: list[tuple[int, ...] | None] = [None]
    monkeypatch.setattr(identity, "pool_layers", lambda: layers[-1])
    return layers


def test_ranks_that_cut_a_cell_and_other_models_are_refused(config: KVFetchConfig) -> None:
    whole = engine_quantiser(config, rank(), GEOMETRY, 0)
    assert isinstance(whole, KltQuantiser)
    assert whole.step == make_profile(cell_heads=2).step_for(None)
    second = engine_quantiser(config, rank(1, 2), replace(GEOMETRY, num_heads=2), 0)
    assert second.identity == whole.identity
    with pytest.raises(ConfigError, match="calibrate again with --tp-size"):
        engine_quantiser(config, rank(1, 4), replace(GEOMETRY, num_heads=1), 0)
    with pytest.raises(ConfigError, match="it has 4 KV heads per rank, the engine has 8"):  # of another model
        engine_quantiser(config, rank(), replace(GEOMETRY, num_heads=8), 0)


def test_a_profile_is_of_the_layers_that_sglangs_pool_has(
    tmp_path: Path, in_the_pool: list[tuple[int, ...] | None]
) -> None:
    """SGLang keeps the others elsewhere: see `LayerMap`."""
    state, own, window = ModelLayer(pool=Pool.STATE), ModelLayer(), ModelLayer(pool=Pool.WINDOW, window=8)
    make_profile(cell_heads=2, layers=LayerMap(layers=(state, own, window, own, own))).save(tmp_path / "p")
    config = parse_config({"store": "http://nowhere", "profile": str(tmp_path / "p")})
    with pytest.raises(ConfigError, match="has the model's layers 1, 3, 4, and SGLang keeps K and V of layers 0, 1, 2"):
        engine_quantiser(config, rank(), GEOMETRY, 0)
    in_the_pool.append((1, 3, 4))
    assert isinstance(engine_quantiser(config, rank(), GEOMETRY, 0), KltQuantiser)


def test_sglang_says_which_layers_its_pool_has(monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(hf_config=object())
    monkeypatch.setattr(runtime_context, "process_model_config", lambda: config)
    apart: dict[str, Any] = {"full_attention_layer_ids": [2]}
    for windows_apart, of_text, expected in (([1, 3], {}, (1, 3)), (None, apart, (2,)), (None, {}, None)):
        config.full_attention_layer_ids, config.hf_text_config = windows_apart, SimpleNamespace(**of_text)
        assert pool_layers() == expected


def test_auto_stores_exact_if_no_profile_fits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was made for fewer ranks. And it goes on looking for one that does, by what its engine needs."""
    watch = Watch("0" * 32, "/model", "model", ProfileNeeds(GEOMETRY, (0, 1, 2), 0, 0, 1))
    asked: list[ProfileNeeds] = []

    def none_fits(config: KVFetchConfig, why: str, needs: Callable[[], ProfileNeeds], take: object) -> KVFetchConfig:
        asked.append(needs())
        return config.as_exact

    def watching(needs: ProfileNeeds) -> Watch:
        asked.append(needs)
        return watch

    monkeypatch.setattr(starting, "engine_config", none_fits)
    monkeypatch.setattr(starting, "profile_watch", watching)
    plane = make(quantiser="auto", target_kl=1e-3)._plane
    assert plane._start.namespace.quantiser == make_quantiser("exact").identity
    assert plane._start.watch == watch
    assert asked[0] == asked[1]
    assert asked[0].target_kl == 1e-3


def test_a_profile_for_other_weights_needs_a_model_id(config: KVFetchConfig) -> None:
    quantiser = engine_quantiser(config, rank(), GEOMETRY, 0)
    calibrated = make_profile().calibration.weights
    require_own_profile(config, quantiser, make_heads(model=f"weights:{calibrated}").namespace)
    with pytest.raises(ConfigError, match=f"weights {calibrated}, but the engine has {'1' * 32}"):
        require_own_profile(config, quantiser, make_heads(model=f"weights:{'1' * 32}").namespace)
    vouched = config.model_copy(update={"model_id": "mine"})
    require_own_profile(vouched, quantiser, make_heads(model="id:mine").namespace)


def test_klt_is_refused_where_fp8_has_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile's means are of K and V, and the pool has them divided."""
    save_file({"layers.0.k_proj.weight": torch.ones(2)}, tmp_path / "1.safetensors")
    none: dict[str, float] = {}
    one = {"layers.0.attn.k_scale": 1.0, "layers.0.attn.v_scale": -1.0}  # -1: there is none
    of_modelopt, of_quark = {"layers.0.k_proj.k_scale": 0.0218}, {"layers.0.v_proj.output_scale": 2.0}
    for scales, params, is_mla, why in (
        (none, None, False, ""),
        (one, None, False, ""),
        (of_modelopt, None, False, "layers.0.k_proj.k_scale in 2.safetensors"),
        (of_quark, None, False, "layers.0.v_proj.output_scale in 2.safetensors"),
        (of_modelopt, None, True, ""),  # of latent vectors, SGLang uses none
        (none, "scales.json", False, "--quantization-param-path scales.json"),
    ):
        save_file({name: torch.tensor(x) for name, x in scales.items()}, tmp_path / "2.safetensors")
        model = SimpleNamespace(model_path=str(tmp_path), revision=None, quantization_param_path=params)
        monkeypatch.setattr(runtime_context, "get_model", lambda model=model: model)
        of_rank = SimpleNamespace(tp_rank=0, tp_size=1, pp_size=1, is_mla_model=is_mla)
        assert starting._why_no_klt(None, of_rank, "bfloat16") == ""
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            found = starting._why_no_klt(None, of_rank, dtype)
            assert why in found
            assert bool(found) == bool(why)
