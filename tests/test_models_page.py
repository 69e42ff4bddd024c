"""The table of docs/models.md says what the code accepts."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import UnquantizedKVCacheMethod
from sglang.srt.mem_cache import memory_pool as device_pools
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.minimax_m3_nvfp4_pool import MiniMaxM3Nvfp4KVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host
from sglang.srt.mem_cache.pool_host.minimax_m3_nvfp4 import MiniMaxM3Nvfp4MainKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from harness.models import FAMILIES, IMAGE_TEXT, OTHER_FAMILIES, OTHER_IMAGE_TEXT
from sgl_kvfetch.codec.calibrate.layers import WINDOWS_APART
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.device.pools import open_pools
from sgl_kvfetch.plugin.host.storage import _require_supported
from tests.codec.calibrate import test_addend, test_layers
from tests.e2e import families
from tests.plugin.backends import storage_config

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text()
NAMED = {
    "full attention (MHA, GQA, MQA)": {
        "llama": "Llama",
        "qwen3": "Qwen3",
        "qwen3_moe": "Qwen3-MoE",
        "phi3": "Phi-3",
        "mistral": "Mistral",
        "phi": "Phi",
        "cohere": "Cohere",
        "granite": "Granite",
        "gpt_neox": "GPT-NeoX",
        "bloom": "Bloom",
    },
    "a norm behind attention": {
        "gemma3_text": "Gemma 3",
        "glm4": "GLM-4",
        "gemma2": "Gemma 2",
        "olmo2": "OLMo 2",
        "olmo3": "OLMo 3",
        "exaone4": "EXAONE-4",
    },
    "layers without a rotation": {"smollm3": "SmolLM3", "cohere2": "Cohere 2"},
    "[image-text models](#images)": {
        "qwen2_5_vl": "Qwen2.5-VL",
        "qwen3_vl": "Qwen3-VL",
        "mistral3": "Mistral 3",
        "gemma3": "Gemma 3 with images",
        "glm4v": "GLM-4.xV",
        "internvl": "InternVL",
    },
    "MLA": {"deepseek_v3": "DeepSeek V3"},
    "windows in a pool of their own": {
        "mellum": "Mellum",
        "gpt_oss": "gpt-oss",
        "gemma4_text": "Gemma 4",
        "mimo_v2_flash": "MiMo V2",
        "llama4": "Llama 4",
        "step3p7": "Step",
    },
    "states beside attention": {
        "lfm2": "LFM2",
        "qwen3_5": "Qwen3.5",
        "qwen3_next": "Qwen3-Next",
        "kimi_linear": "Kimi Linear",
        "nemotron_h": "Nemotron-H",
        "granitemoehybrid": "Granite 4",
    },
    "MLA with an indexer": {"deepseek_v32": "DeepSeek V3.2", "glm_moe_dsa": "GLM-5"},
}
"""What the tests' models are called in the table, by row and by their types in transformers."""


class Row(NamedTuple):
    """What SGLang has for a family: its host pool of K and V, its device pool, and what its radix cache keeps."""

    host: type
    device: type
    components: tuple[ComponentType, ...] = (ComponentType.FULL,)


FULL = Row(MHATokenToKVPoolHost, device_pools.MHATokenToKVPool)
STATES = Row(MHATokenToKVPoolHost, device_pools.HybridLinearKVPool, (ComponentType.FULL, ComponentType.MAMBA))
POOLS = {
    "full attention (MHA, GQA, MQA)": FULL,
    "a norm behind attention": FULL,
    "layers without a rotation": FULL,
    "[image-text models](#images)": FULL,
    "MLA": Row(MLATokenToKVPoolHost, device_pools.MLATokenToKVPool),
    "windows in a pool of their own": Row(MHATokenToKVPoolHost, SWAKVPool, (ComponentType.FULL, ComponentType.SWA)),
    "states beside attention": STATES,
    "attention and a state in each layer": STATES,
    "MLA with an indexer": Row(MLATokenToKVPoolHost, device_pools.DSATokenToKVPool),
    "K and V with an indexer": Row(MHATokenToKVPoolHost, device_pools.MiniMaxSparseKVPool),
    "a KV cache in fp8 (`e4m3`, `e5m2`)": FULL,
    "a KV cache in NVFP4 or MXFP8": Row(MHATokenToKVPoolMXFP8Host, device_pools.MHATokenToKVPoolMXFP8),
    "compressed keys": Row(LogicalHostPool, DeepSeekV4TokenToKVPool),
}


def rows() -> dict[str, list[str]]:
    """The cells of the families' table behind each family's name."""
    lines = PAGE.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {family: behind for family, *behind in cells}


def families_of(test: Any) -> set[str]:
    """The types of models that a test has as its first parameter."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return {case if isinstance(case, str) else case[0] for case in mark.args[1]}


def test_every_model_of_the_tests_is_named_in_its_row_and_no_other_is() -> None:
    served = {*FAMILIES, *IMAGE_TEXT, "llama", *test_layers.MADE}
    served |= {*families.SEEN, *families.IN_TRITON}
    calibrated = families_of(test_layers.test_layers_compute_what_the_whole_model_does)
    calibrated |= {*test_layers.WITH_IMAGES, *test_addend.FAMILIES, *OTHER_FAMILIES, *OTHER_IMAGE_TEXT} | served
    assert {name for models in NAMED.values() for name in models} == calibrated
    for family, (_, _, _, tried) in rows().items():
        found = {label: set(names.split(", ")) for label, names in re.findall(r"(SGLang|calibration): ([^;]*)", tried)}
        models = NAMED.get(family, {})
        expected = {"SGLang": {name for model, name in models.items() if model in served}}
        expected["calibration"] = {name for model, name in models.items() if model not in served}
        assert found == {label: names for label, names in expected.items() if names}, family


def test_klt_is_named_where_calibration_was_tried() -> None:
    for family, (_, host, device, _) in rows().items():
        if family not in ("a KV cache in fp8 (`e4m3`, `e5m2`)", "a draft model"):  # which are no models
            assert ("`klt`" in host) == (family in NAMED), family
            assert ("`klt`" in device) == (family in NAMED and "`exact`" in device), family
    refused = families_of(test_layers.test_layers_without_plain_keys_and_values_are_named)
    assert refused & {model for models in NAMED.values() for model in models} == {"gemma4_text"}  # with other flags


@pytest.mark.parametrize("family", POOLS)
def test_modes_are_named_that_take_the_pools(family: str) -> None:
    _, host, device, _ = rows()[family]
    assert ("`exact`" in host) == takes_host(POOLS[family].host)
    assert ("`exact`" in device) == takes_device(POOLS[family])


def takes_host(kind: type) -> bool:
    pool: Any = object.__new__(kind)
    if issubclass(kind, MLATokenToKVPoolHost):
        vars(pool).update(kv_lora_rank=512, qk_rope_head_dim=64, kv_cache_dim=576)
    try:
        _require_supported(storage_config(), pool)
    except UnsupportedError:
        return False
    return True


def takes_device(row: Row) -> bool:
    plain = device_pools.MHATokenToKVPool(1, 1, torch.bfloat16, 1, 1, 1, "cpu", False)
    pool: Any = object.__new__(row.device)
    vars(pool).update(k_buffer=[], v_buffer=[], kv_buffer=[], kv_lora_rank=512, use_dsa=False, kv_cache_layout="nhd")
    vars(pool).update(quant_method=UnquantizedKVCacheMethod(), full_kv_pool=plain, swa_kv_pool=plain)
    vars(pool).update(kv_cache_dim=576, qk_rope_head_dim=64, store_dtype=torch.bfloat16)
    index_keys = [torch.zeros(1, 8, dtype=torch.uint8)]
    vars(pool).update(index_key_cache=SimpleNamespace(buffer=index_keys), main_pool=plain, dense_pool=None)
    indexer = SimpleNamespace(k_buffer=plain.k_buffer, store_dtype=torch.bfloat16)
    vars(pool).update(index_kv_pool=None, index_k_pool=indexer)
    vars(pool).update(layers_mapping={0: (0, False), 1: (0, True)}, full_attention_layer_id_mapping={0: 0})
    state = torch.zeros(1, 2, 3)
    requests = SimpleNamespace(
        mamba_map={1: 0},
        mamba_ckpt_pool=None,
        short_conv_pool=SimpleNamespace(enabled=False),
        ngram_pool=SimpleNamespace(enabled=False),
        mamba_pool=SimpleNamespace(mamba_cache=SimpleNamespace(temporal=state, conv=[state])),
    )
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    params = SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        page_size=1,
        swa_retain_window=8,
        req_to_token_pool=requests,
        mtp_draft_device_pools=(),
        mtp_draft_mamba_pools=(),
        sidecar_draft_device_pools=(),
    )
    try:
        open_pools(params, row.components)
    except UnsupportedError:
        return False
    return True


def test_minimax_m3_in_nvfp4_is_refused() -> None:
    assert not takes_host(MiniMaxM3Nvfp4MainKVPoolHost)
    assert not takes_device(Row(MiniMaxM3Nvfp4MainKVPoolHost, MiniMaxM3Nvfp4KVPool))


def test_every_family_is_compared() -> None:
    """A draft model's pools are tried in tests/plugin/device/test_side_pools.py."""
    assert {*rows()} == {*POOLS, "a draft model"}


def test_examples_with_windows_apart_are_those_of_the_table_of_pools() -> None:
    apart = [name.lower() for name in WINDOWS_APART]
    for family, (examples, *_) in rows().items():
        names = [name.lower().replace("-", "").replace(" ", "").replace(".", "p") for name in examples.split(", ")]
        found = {name for name in names if any(each.startswith(name) for each in apart)}
        assert found == (set(names) if family in ("windows in a pool of their own", "compressed keys") else set())
