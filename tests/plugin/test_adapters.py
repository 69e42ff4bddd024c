"""Tests the names of LoRA adapters' pages, with SGLang's own adapters and requests."""

from __future__ import annotations

import array
import json
import shutil
import struct
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang.srt.runtime_context as runtime_context
import torch
import xxhash
from safetensors.torch import load_file, save_file
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.sampling.sampling_params import SamplingParams
from transformers import AutoConfig

from harness.models import make_adapter, make_tiny_llama
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin import adapters

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("adapters") / "model", hidden_size=32, intermediate_size=32)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a stand-in for SGLang's manager of adapters. Adapters that SGLang loads are noted, as by our hook."""
    monkeypatch.setattr(adapters, "_state", adapters._State())
    normalise = LoRAAdapter._normalize_weights

    def note_and_normalise(adapter: LoRAAdapter) -> None:
        adapters.record_adapter(adapter)
        normalise(adapter)

    monkeypatch.setattr(LoRAAdapter, "_normalize_weights", note_and_normalise)
    _launch(monkeypatch, "kvfetch", hierarchical=False)
    found = SimpleNamespace(loras={}, target_modules={"qkv_proj", "o_proj"})
    adapters.watch_adapters(found)
    return found


def _launch(monkeypatch: pytest.MonkeyPatch, backend: str | None, *, hierarchical: bool) -> None:
    memory = SimpleNamespace(hicache_storage_backend=backend, enable_hierarchical_cache=hierarchical)
    monkeypatch.setattr(runtime_context, "get_memory", lambda: memory)
    monkeypatch.setattr(runtime_context, "get_lora", lambda: SimpleNamespace(enable_lora=True))


def _make(model: Path, config: LoRAConfig, tensors: dict[str, torch.Tensor]) -> LoRAAdapter:
    adapter = LoRAAdapter("id", config, AutoConfig.from_pretrained(model), LoadConfig(), SimpleNamespace())
    adapter.initialize_weights_from_tensors(tensors)
    return adapter


def _load(model: Path, path: Path) -> LoRAAdapter:
    return _make(model, LoRAConfig(str(path)), load_file(path / "adapter_model.safetensors"))


def _extra_key(manager: SimpleNamespace, adapter: LoRAAdapter, extra_key: str | None = None) -> str | None:
    """Return the key of a request with an adapter that SGLang has given a random id."""
    manager.loras["f" * 32] = adapter
    req = Req("rid", "", array.array("q", [1]), SamplingParams(), lora_id="f" * 32, extra_key=extra_key, vocab_size=9)
    adapters.name_by_content(None, req)
    return req.extra_key


def test_equal_adapters_have_equal_names_and_others_do_not(
    manager: SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    one = make_adapter(tmp_path / "one", model, seed=1)
    adapter = _load(model, one)
    name = _extra_key(manager, adapter)
    assert _extra_key(manager, adapter, "tenant") == f"tenant{name}"  # a client's own key stays in front
    assert _extra_key(manager, _load(model, shutil.copytree(one, tmp_path / "two"))) == name
    file = one / "adapter_model.safetensors"
    config = LoRAConfig.from_dict(json.loads((one / "adapter_config.json").read_text()))
    tensors = load_file(file)
    assert _extra_key(manager, _make(model, config, dict(reversed(tensors.items())))) == name
    tensors[min(tensors)][0, 0] += 1
    save_file(tensors, file)
    assert _extra_key(manager, _load(model, one)) != name


def test_the_digest_is_the_one_that_the_format_describes(manager: SimpleNamespace, model: Path) -> None:
    """Other programs may compute it. If this fails, pages of adapters that were stored before are not found."""
    names = [f"base_model.model.model.layers.{layer}.self_attn.o_proj.lora_A.weight" for layer in (1, 0)]
    values = [torch.full((2, 3), 1.5), torch.arange(6).bfloat16().reshape(2, 3)]
    config = {"r": 2, "lora_alpha": 4, "peft_type": "LORA", "target_modules": ["o_proj"]}
    adapter = _make(model, LoRAConfig.from_dict(config), dict(zip(names, values, strict=True)))
    contents = [struct.pack("<6f", *[1.5] * 6), b"".join(struct.pack("<f", value)[2:] for value in range(6))]
    lines = [
        f"{name}\0{dtype}\0" + f"2,3\0{xxhash.xxh3_128_hexdigest(content)}\n"
        for name, dtype, content in zip(names, ("float32", "bfloat16"), contents, strict=True)
    ]
    text = "".join(reversed(lines)) + '{"lora_alpha":4,"peft_type":"LORA","r":2,"target_modules":["o_proj"]}'
    assert _extra_key(manager, adapter) == xxhash.xxh3_128_hexdigest(text.encode())


def test_an_adapter_of_all_layers_is_named_with_those_that_the_server_adapts(
    manager: SimpleNamespace, model: Path, tmp_path: Path
) -> None:
    path = make_adapter(tmp_path / "one", model, seed=1)
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": "all-linear"}))
    adapter = _load(model, path)
    name = _extra_key(manager, adapter)
    assert _extra_key(manager, adapter) == name
    manager.target_modules = {"qkv_proj"}
    assert _extra_key(manager, adapter) != name


def test_launches_that_cannot_attach_our_backend_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, hierarchical, is_named in (
        ("kvfetch", True, True),
        ("kvfetch", False, True),
        (None, True, True),
        (None, False, False),
        ("file", True, False),
    ):
        monkeypatch.setattr(adapters, "_state", adapters._State())
        _launch(monkeypatch, backend, hierarchical=hierarchical)
        adapters.watch_adapters(SimpleNamespace())
        with nullcontext() if is_named else pytest.raises(UnsupportedError, match="start the server with"):
            adapters.require_named_adapters()
