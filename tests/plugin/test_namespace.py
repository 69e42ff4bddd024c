"""Tests what makes the KV caches of two engines incompatible, besides their geometry."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import sglang.srt.models
import sglang.srt.runtime_context as runtime_context
from sglang.srt.arg_groups.arg_utils import namespace_of
from sglang.srt.configs.model_config import ModelConfig, ModelImpl
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs

from sgl_kvfetch.codec.quant.base import Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.keys import HeadSlice, Labels
from sgl_kvfetch.plugin import adapters, weight_updates
from sgl_kvfetch.plugin.identity import (
    READ_CONTEXT_LENGTH,
    compute_flags,
    draft_model,
    engine_heads,
)
from sgl_kvfetch.protocol.config import parse_config
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile

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
    groups["model"].model_path = "org/model"
    monkeypatch.setattr(get_context(), "_config_bags", {k: v for k, v in groups.items() if "." not in k})
    monkeypatch.setattr(weight_updates, "_state", weight_updates._State())
    return groups


def _heads(
    quantiser: Quantiser | None = None, geometry: KVGeometry = GEOMETRY, rank: int = 0, size: int = 1, **config: Any
) -> HeadSlice:
    parsed = parse_config({"store": "http://nowhere"} | config)
    place = SimpleNamespace(tp_rank=rank, tp_size=size, is_mla_model=False)
    return engine_heads(parsed, quantiser or make_quantiser("exact"), place, geometry, 0)


def test_ranks_of_any_tp_size_share_a_namespace(flags: dict[str, Bag], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(get_context(), "_server_args", object())
    for rank_heads, rank, size, model_heads, expected in (
        (8, 0, 1, 8, "0-8"),
        (4, 1, 2, 8, "4-8"),
        (1, 3, 8, 8, "3-4"),
        (1, 1, 4, 2, "0-1"),  # two ranks have the same head
        (1, 2, 4, 2, "1-2"),
    ):
        model = SimpleNamespace(get_total_num_kv_heads=lambda num=model_heads: num)
        monkeypatch.setattr(ModelConfig, "from_server_args", lambda server_args, model=model: model)
        heads = _heads(geometry=replace(GEOMETRY, num_heads=rank_heads), rank=rank, size=size, model_id="mine")
        assert heads.namespace.num_heads == model_heads
        assert heads.folder == f"{heads.namespace.digest()}.{expected}"


def test_labels_are_no_part_of_the_namespace(flags: dict[str, Bag]) -> None:
    heads = _heads(model_id="mine")
    assert heads.labels == Labels("org/model")
    flags["serving"].served_model_name = "chat"
    renamed = _heads(model_id="mine")
    assert renamed.labels == Labels("chat")
    assert (renamed.folder, renamed) == (heads.folder, heads)
    flags["model"].json_model_override_args = '{"b": 1,  "a": [2]}'
    profile = make_profile(num_layers=1, num_heads=1, head_dim=8, v_head_dim=8, cell_layers=1, cell_heads=1)
    of_klt = _heads(KltQuantiser(profile, step=1.0), model_id="mine", profile="p", target_kl=0.002)
    assert of_klt.labels == Labels("chat", "klt 2e-3", 'json_model_override_args={"a":[2],"b":1}')


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("model", "kv_cache_dtype", "fp8_e4m3"),
        ("model", "json_model_override_args", '{"rope_theta": 1}'),
        ("model", "modelopt_quant", "fp8"),
        ("model", "custom_weight_loader", ["a.b"]),
        ("model", "load_format", "pt"),
        ("model", "model_loader_extra_config", '{"qlora_adapter_name_or_path": "/adapter"}'),
        ("exec.moe", "kt_weight_path", "/no/such/folder"),
        ("observability", "forward_hooks", [{"name": "x"}]),
    ],
)
def test_flags_that_change_values_change_the_string(flags: dict[str, Bag], group: str, name: str, value: Any) -> None:
    setattr(flags[group], name, value)
    assert re.fullmatch(r"dtype=auto;quantization=None;flags=[0-9a-f]{16}", compute_flags())


@pytest.mark.parametrize(
    ("group", "name", "value"),
    [
        ("model", "model_path", "/elsewhere"),
        ("model", "download_dir", "/elsewhere"),
        ("model", "json_model_override_args", " { } "),
        ("model", "custom_weight_loader", []),
        ("model", "context_length", 2048),
        ("model", "trust_remote_code", True),
        ("model", "load_format", "fastsafetensors"),
        ("model", "model_loader_extra_config", '{"enable_multithread_load": true, "num_threads": 8}'),
        ("exec.kernel", "attention_backend", "triton"),
    ],
)
def test_flags_that_change_no_values_do_not_count(
    flags: dict[str, Bag], llama: SimpleNamespace, group: str, name: str, value: Any
) -> None:
    setattr(flags[group], name, value)
    assert compute_flags() == "dtype=auto;quantization=None"


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["LlamaForCausalLM"]))
    config._resolved_model_impl = ModelImpl.SGLANG
    monkeypatch.setattr(runtime_context, "process_model_config", lambda: config)
    return config


@pytest.mark.parametrize("why", [*sorted(READ_CONTEXT_LENGTH), "a draft model"])
def test_the_length_counts_for_models_that_make_their_rotation_for_it(
    flags: dict[str, Bag], llama: SimpleNamespace, why: str
) -> None:
    """As a draft model may."""
    if why == "a draft model":
        flags["spec"].speculative_draft_model_path = "/draft"
    else:
        llama.hf_config.architectures = [why]
    unset = compute_flags()
    flags["model"].context_length = 2048
    assert compute_flags() != unset
    llama._resolved_model_impl = ModelImpl.TRANSFORMERS
    unset = compute_flags()
    flags["model"].trust_remote_code = True  # SGLang has no code for it
    assert compute_flags() != unset


def test_the_models_that_read_the_length_are_known() -> None:
    """Each of SGLang's modules that reads the length from its config, and the classes that it registers. The two that
    are left out have a rotary embedding without scaling: there the length only sets how many rows its table has."""
    readers = {}
    for file in Path(sglang.srt.models.__path__[0]).glob("*.py"):
        text = file.read_text()
        if re.search(r"""\bconfig\.context_len\b|["']context_len["']|\bconfig, "context_len\"""", text):
            entry = re.search(r"^EntryClass = (.*)$", text, re.MULTILINE)
            readers[file.stem] = set(re.findall(r"\w+", entry[1])) if entry else set()
    assert set(readers) - {"embedding_gemma2", "muse_spark"} == {"grok", "mimo_v2", "mimo_v2_nextn"}
    assert readers["grok"] | readers["mimo_v2"] == READ_CONTEXT_LENGTH
    assert readers["mimo_v2_nextn"] == {"MiMoV2MTP"}  # the draft model of a target that is in the list


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


def test_a_model_id_is_required_if_files_do_not_identify_the_weights(flags: dict[str, Bag]) -> None:
    for name, value, message in (
        ("weight_cache_mode", "client", "from a daemon; set model_id"),
        ("load_format", "dummy", "random weights; set model_id"),
        ("load_format", "remote_instance", "from another server; set model_id"),
    ):
        setattr(flags["model"], name, value)
        with pytest.raises(UnsupportedError, match=message):
            _heads()
        assert _heads(model_id="mine").namespace.model == "id:mine"


def test_adapters_are_no_part_of_the_namespace(
    flags: dict[str, Bag], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests without an adapter share pages with servers that have none."""
    monkeypatch.setattr(adapters, "_state", adapters._State())
    (tmp_path / "model.safetensors").write_bytes(b"w")
    flags["model"].model_path = str(tmp_path)
    name = _heads().namespace.model
    assert re.fullmatch("weights:[0-9a-f]{32}", name)
    flags["lora"].enable_lora = True
    with pytest.raises(UnsupportedError, match="adapters were loaded for another storage backend"):
        _heads()
    adapters._state.manager = object()
    assert _heads().namespace.model == name


def _draft(**config: Any) -> str:
    return draft_model(parse_config({"store": "http://nowhere"} | config))


@pytest.fixture
def draft(flags: dict[str, Bag], tmp_path: Path) -> Bag:
    (tmp_path / "draft.safetensors").write_bytes(b"w")
    flags["spec"].speculative_algorithm = "EAGLE3"
    flags["spec"].speculative_draft_model_path = str(tmp_path)
    return flags["spec"]


def test_draft_models_are_told_apart_by_their_weights_and_how_they_compute(draft: Bag, tmp_path: Path) -> None:
    seen, with_id = {_draft()}, {_draft(model_id="mine")}
    draft.speculative_num_steps = 5
    draft.speculative_draft_attention_backend = "triton"
    assert {_draft()} == seen
    (tmp_path / "draft.safetensors").write_bytes(b"x")
    seen.add(_draft())
    for name, value in (
        ("speculative_algorithm", "EAGLE"),
        ("speculative_draft_kv_cache_dtype", "fp8_e5m2"),
        ("speculative_draft_model_quantization", "fp8"),
        ("speculative_draft_window_size", 512),
    ):
        setattr(draft, name, value)
        seen.add(_draft())
        with_id.add(_draft(model_id="mine"))
    assert (len(seen), len(with_id)) == (6, 5)


def test_a_draft_model_without_files_needs_a_model_id(draft: Bag, flags: dict[str, Bag]) -> None:
    flags["model"].load_format = "dummy"
    with pytest.raises(UnsupportedError, match="draft-load-format dummy has random weights; set model_id"):
        _draft()
    draft.speculative_draft_load_format = "safetensors"
    assert "weights:" in _draft()
    draft.speculative_draft_model_path = "/nowhere"
    with pytest.raises(UnsupportedError, match="set model_id"):
        _draft()
    assert "weights:" not in _draft(model_id="mine")
    draft.speculative_draft_model_path = None
    assert "weights:" not in _draft()  # it is in the model's own files
