"""The table of docs/models.md says what the code accepts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from harness.models import FAMILIES, IMAGE_TEXT, OTHER_FAMILIES, OTHER_IMAGE_TEXT
from sgl_kvfetch.codec.calibrate.layers import WINDOWS_APART
from tests.codec.calibrate import test_addend, test_layers
from tests.e2e import test_families

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
    served |= {*test_families.SEEN, *test_families.IN_TRITON}
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


def test_examples_with_windows_apart_are_those_of_the_table_of_pools() -> None:
    apart = [name.lower() for name in WINDOWS_APART]
    for family, (examples, *_) in rows().items():
        names = [name.lower().replace("-", "").replace(" ", "").replace(".", "p") for name in examples.split(", ")]
        found = {name for name in names if any(each.startswith(name) for each in apart)}
        assert found == (set(names) if family in ("windows in a pool of their own", "compressed keys") else set())
