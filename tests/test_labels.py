"""Names for people, of models and quantisers."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvfetch.keys import (
    MAX_LABEL_CHARS,
    Labels,
    are_named,
    label_of_flags,
    label_of_klt,
    label_of_model,
    label_of_request,
)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("exact", "exact"),
        ("uint8(k=256;v=256)", "uint8"),
        ("cachegen(k=32,32,32,16;v=32,16)", "cachegen 32/16"),
        ("cachegen(k=32,16;v=16)", "cachegen k 32/16, v 16"),
        (f"klt(profile={'0' * 32};step=0.04321)", "klt step 0.0432"),
        ("a later one(x=1)", "a later one"),
        (f"klt(profile={'0' * 32};step=1.2.3)",) * 2,
    ],
)
def test_quantisers_without_a_label(identity: str, expected: str) -> None:
    assert Labels().quantiser_name(identity) == expected
    assert Labels("m", "klt 6.5e-4").quantiser_name(identity) == "klt 6.5e-4"


@pytest.mark.parametrize(("target", "expected"), [(6.49e-4, "klt 6.5e-4"), (1e-3, "klt 1e-3"), (0.25, "klt 2.5e-1")])
def test_klt_is_named_by_its_target(target: float, expected: str) -> None:
    assert label_of_klt(target) == expected


def test_a_label_of_many_flags_is_cut() -> None:
    assert label_of_flags({"b": None, "a": "x" * 500}) == ("a=" + "x" * 500)[:MAX_LABEL_CHARS]
    assert label_of_flags({"b": False, "a": "x"}) == "a=x, b=false"
    assert label_of_flags({}) == ""


def test_a_short_id_is_a_requests_label() -> None:
    assert label_of_request("") == ""
    assert label_of_request(5) == "5"  # type: ignore[arg-type]
    assert label_of_request("chatcmpl-\N{SNOWMAN}") == "chatcmpl-\N{SNOWMAN}"


@pytest.mark.parametrize("request_id", ["x" * 1000, "\ud800" * 200, "\N{SNOWMAN}" * 146])
def test_a_long_id_is_cut_and_told_apart(request_id: str) -> None:
    label = label_of_request(request_id)
    assert len(label) == MAX_LABEL_CHARS + 17
    assert label.encode().decode() == label
    assert label[:8] == label_of_request(request_id[:4] * 2)[:8]
    assert label_of_request(label) == label  # `kvfetch why` takes what a server shows
    assert label_of_request(request_id + "y") != label
    assert label_of_request("\udc80") == label_of_model("\udc80", "") == "\\udc80"
    assert label_of_flags({"kv_cache_dtype": "\udc80"}) == "kv_cache_dtype=\\udc80"


def test_models_are_named_as_they_are_served(tmp_path: Path) -> None:
    cached = f"{tmp_path}/models--org--llama-1b/snapshots/0123abc"
    assert label_of_model("chat", "/models/llama-70b") == "chat"
    assert label_of_model("org/llama", "org/llama") == "org/llama"
    assert label_of_model("/models/llama-70b/", "/models/llama-70b/") == "llama-70b"
    assert label_of_model(cached, cached) == "org/llama-1b"
    assert label_of_model("x" * 500, "m") == "x" * MAX_LABEL_CHARS
    assert Labels().model_name("id:mine") == "mine"
    assert Labels("chat").model_name("id:mine") == "chat"


def test_a_directory_is_named_by_its_last_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert label_of_model("models/llama", "models/llama") == "llama"


@pytest.mark.parametrize("name", ["org/llama", "llama", "id:mine", "mine", "/models/llama"])
def test_what_people_write_names_a_model(name: str) -> None:
    labels = Labels("llama" if name.startswith("/") else "org/llama")
    assert are_named(name, "id:mine", labels)
    assert not are_named(name + "-2", "id:mine", labels)


def test_a_fingerprint_names_a_model() -> None:
    assert are_named("weights:12ab", "weights:12ab", Labels())
    assert are_named("12ab", "weights:12ab", Labels())
    assert not are_named("", "weights:12ab", Labels())
