"""Tests what makes the KV caches of two engines incompatible, besides their geometry."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sgl_kvfetch.config import parse_config
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import weight_updates
from sgl_kvfetch.plugin.compute_flags import FILES, IRRELEVANT, JSON_TEXTS, RELEVANT, compute_flags
from sgl_kvfetch.plugin.namespace import engine_heads
from sgl_kvfetch.quant import make_quantiser
from sgl_kvfetch.types import KVGeometry

pytestmark = pytest.mark.filterwarnings("ignore")

GEOMETRY = KVGeometry(num_layers=1, num_heads=1, k_head_dim=8, v_head_dim=8, page_size=4, dtype="bfloat16")


class Bag(SimpleNamespace):
    """Stands for one group of SGLang's resolved config."""


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> dict[str, Bag]:
    """Return SGLang's published config with every flag at its default, by the groups' paths."""
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in msgspec.structs.fields(ServerArgs)
    }
    groups: dict[str, Bag] = {}
    for name, path in namespace_of(ServerArgs).items():
        for depth in range(path.count(".") + 1):
            parent, _, own = (ancestor := path.rsplit(".", path.count(".") - depth)[0]).rpartition(".")
            if ancestor not in groups:
                groups[ancestor] = Bag()
                if parent:
                    setattr(groups[parent], own, groups[ancestor])
        setattr(groups[path], name, defaults[name])
    monkeypatch.setattr(get_context(), "_config_bags", {k: v for k, v in groups.items() if "." not in k})
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())
    return groups


def _model(**config: Any) -> str:
    parsed = parse_config({"store": "file:///nowhere"} | config)
    place = SimpleNamespace(tp_rank=0, tp_size=1)
    return engine_heads(parsed, make_quantiser("exact"), place, GEOMETRY, 0).namespace.model


def test_the_lists_name_flags_of_sglang() -> None:
    groups = namespace_of(ServerArgs)
    assert {groups[name] for name in IRRELEVANT} == {"model"}
    assert {f"{groups[path.rpartition('.')[2]]}.{path.rpartition('.')[2]}" for path in RELEVANT} == set(RELEVANT)
    assert set(groups) >= FILES | JSON_TEXTS


def test_defaults_are_a_stable_short_string(flags: dict[str, Bag]) -> None:
    assert compute_flags() == "dtype=auto;quantization=None"
    flags["model"].json_model_override_args = " { } "
    flags["model"].model_path = "/elsewhere"
    flags["model"].download_dir = "/elsewhere"
    flags["model"].custom_weight_loader = []
    flags["exec.kernel"].attention_backend = "triton"
    assert compute_flags() == "dtype=auto;quantization=None"


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("model", "kv_cache_dtype", "fp8_e4m3"),
        ("model", "context_length", 2048),
        ("model", "json_model_override_args", '{"rope_theta": 1}'),
        ("model", "modelopt_quant", "fp8"),
        ("model", "custom_weight_loader", ["a.b"]),
        ("model", "load_format", "flash_rl"),
        ("exec.dllm", "dllm_algorithm", "LowConfidence"),
        ("exec.moe", "kt_weight_path", "/no/such/folder"),
        ("observability", "forward_hooks", [{"name": "x"}]),
    ],
)
def test_flags_that_change_values_change_the_string(flags: dict[str, Bag], group: str, name: str, value: Any) -> None:
    setattr(flags[group], name, value)
    assert re.fullmatch(r"dtype=auto;quantization=None;flags=[0-9a-f]{16}", compute_flags())


def test_the_order_of_an_override_does_not_count(flags: dict[str, Bag]) -> None:
    flags["model"].json_model_override_args = '{"a": 1, "b": 2}'
    one = compute_flags()
    flags["model"].json_model_override_args = '{"b": 2,  "a": 1}'
    assert compute_flags() == one


@pytest.mark.parametrize("is_folder", [False, True])
def test_the_content_of_a_file_counts_not_its_location(flags: dict[str, Bag], tmp_path: Path, is_folder: bool) -> None:
    digests = []
    for place, content in (("a", "1"), ("b", "1"), ("c", "2")):
        path = tmp_path / place
        if is_folder:
            path.mkdir()
        (path / "file" if is_folder else path).write_text(content)
        flags["model"].quantization_param_path = str(path)
        digests.append(compute_flags())
    assert digests[0] == digests[1] != digests[2]


def test_weights_are_named_by_their_files_or_by_the_user(flags: dict[str, Bag], tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"w")
    flags["model"].model_path = str(tmp_path)
    assert re.fullmatch("weights:[0-9a-f]{32}", _model())
    assert _model(model_id="mine") == "id:mine"


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("model", "load_format", "dummy", "random weights; set model_id"),
        ("model", "load_format", "remote_instance", "from another server; set model_id"),
        ("model", "weight_cache_mode", "client", "from a daemon; set model_id"),
        ("lora", "enable_lora", True, "LoRA needs model_id"),
    ],
)
def test_a_model_id_is_required_if_files_do_not_identify_the_weights(
    flags: dict[str, Bag], group: str, name: str, value: Any, message: str
) -> None:
    setattr(flags[group], name, value)
    with pytest.raises(UnsupportedError, match=message):
        _model()
    assert _model(model_id="mine") == "id:mine"


def test_changed_weights_need_a_new_model_id(flags: dict[str, Bag]) -> None:
    weight_updates.weights_change("UpdateWeightFromDiskReqInput")
    with pytest.raises(UnsupportedError, match="set model_id"):
        _model()
    assert _model(model_id="mine") == "id:mine"
