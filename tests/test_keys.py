"""Names of what is stored, and names for people, of models and quantisers."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.errors import FormatError, NamespaceMismatchError
from sgl_kvfetch.keys import (
    MAX_LABEL_CHARS,
    ContentCheck,
    HeadSlice,
    Labels,
    Namespace,
    SegmentKey,
    are_named,
    buddy_split,
    is_power_of_two,
    label_of_flags,
    label_of_klt,
    label_of_model,
    label_of_request,
    parse_object_name,
)
from sgl_kvfetch.stores.base import object_digest
from tests.segments import make_heads


@settings(deadline=None)
@given(first=st.integers(0, 5000), count=st.integers(0, 5000), log=st.integers(0, 10))
def test_a_split_is_aligned_whole_and_without_gaps(first: int, count: int, log: int) -> None:
    page = first
    for start, length in buddy_split(first, count, 1 << log):
        assert start == page
        assert is_power_of_two(length)
        assert length <= 1 << log
        assert start % length == 0
        page += length
    assert page == first + count


def test_a_split_has_the_longest_segments_that_are_aligned() -> None:
    assert list(buddy_split(0, 39, 512)) == [(0, 32), (32, 4), (36, 2), (38, 1)]
    assert list(buddy_split(39, 25, 512)) == [(39, 1), (40, 8), (48, 16)]


def test_every_field_of_a_namespace_counts_and_so_do_heads() -> None:
    namespace = make_heads().namespace
    for field in fields(Namespace):
        value = getattr(namespace, field.name)
        change: dict[str, Any] = {field.name: value + "x" if isinstance(value, str) else value + 1}
        other = replace(namespace, **change)
        assert other.digest() != namespace.digest()
        with pytest.raises(NamespaceMismatchError, match=f": {field.name} is "):
            namespace.require_same(other)
    namespace.require_same(make_heads().namespace)
    both = make_heads()
    first = HeadSlice(both.namespace, range(1))
    assert first.folder == f"{both.namespace.digest()}.0-1"
    assert (first.geometry.num_heads, both.geometry.num_heads) == (1, 2)
    with pytest.raises(NamespaceMismatchError, match="segment has heads 0, expected 0-1"):
        both.require_same(first)
    both.require_same(make_heads())


def test_siblings_have_heads_in_common() -> None:
    namespace = replace(make_heads().namespace, num_heads=8)
    half = HeadSlice(namespace, range(4, 8))
    names = ["0-4", "4-8", "0-8", "4-6", "6-8", "5-6", "8-12", "9-5", "5-5"]
    found = half.siblings(f"{namespace.digest()}.{name}" for name in names)
    assert [each.folder.partition(".")[2] for each in found] == ["0-8", "4-6", "5-6", "6-8"]
    # They are few: each is asked in every lookup, and whoever may write can make folders.
    folders = [f"{namespace.digest()}.{start}-{stop}" for start in range(40) for stop in range(40)]
    found = HeadSlice(namespace, range(8)).siblings(folders)
    assert len(found) == 2 + 4 + 8  # ranks of TP=2, 4 and 8


SPACE = "ab" * 16 + ".0-8"


def test_names_of_objects_are_those_that_parse() -> None:
    key = SegmentKey(SPACE, 32, bytes(range(32)))
    manifest = parse_object_name(key.manifest_name)
    assert manifest.segment == key
    assert manifest.is_manifest
    data = parse_object_name(key.data_name("cd" * 16))
    assert data.segment == key
    assert data.content_digest == "cd" * 16
    for name in (
        "../../etc/passwd",
        f"{SPACE}/../x.kvm",
        f"{SPACE}/0-{'00' * 32}.kvm",
        f"{SPACE}/1-{'00' * 32}",
        f"{SPACE}/1-{'00' * 32}.kvm\n",
        f"{SPACE}/1-{'00' * 32}.xyz.kvd",
        f"{'AB' * 16}.0-8/1-{'00' * 32}.kvm",
        f"{'ab' * 16}/1-{'00' * 32}.kvm",
    ):
        with pytest.raises(FormatError, match="not an object name"):
            parse_object_name(name)


def test_content_is_checked_against_the_digest_in_the_name() -> None:
    name = SegmentKey(SPACE, 32, bytes(range(32))).data_name("99aa06d3014798d86001c324468d497f")  # xxh3-128 of b""
    assert ContentCheck(name).is_sound
    assert not ContentCheck(name, b"x").is_sound
    whole = object_digest(b"first second")
    check = ContentCheck(SegmentKey(SPACE, 32, bytes(32)).data_name(whole), b"first ")
    assert not check.is_sound
    check.add(memoryview(b"second"))
    assert check.is_sound


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("uint8(k=256;v=256)", "uint8"),
        ("cachegen(k=32,32,32,16;v=32,16)", "cachegen 32/16"),
        ("cachegen(k=32,16;v=16)", "cachegen k 32/16, v 16"),
        (f"klt(profile={'0' * 32};step=0.04321)", "klt step 0.0432"),
        (f"klt(profile={'0' * 32};step=1.2.3)",) * 2,
    ],
)
def test_quantisers_without_a_label(identity: str, expected: str) -> None:
    assert Labels().quantiser_name(identity) == expected
    assert Labels("m", "klt 6.5e-4").quantiser_name(identity) == "klt 6.5e-4"


def test_labels() -> None:
    assert [label_of_klt(target) for target in (6.49e-4, 1e-3)] == ["klt 6.5e-4", "klt 1e-3"]
    assert label_of_flags({"b": False, "a": "x"}) == "a=x, b=false"
    assert label_of_flags({"a": "\udc80" + "x" * 500}) == ("a=\\udc80" + "x" * 500)[:MAX_LABEL_CHARS]
    assert label_of_request(5) == "5"  # type: ignore[arg-type]


@pytest.mark.parametrize("request_id", ["\ud800" * 200, "\N{SNOWMAN}" * 146])
def test_a_long_id_is_cut_and_told_apart(request_id: str) -> None:
    label = label_of_request(request_id)
    assert len(label) == MAX_LABEL_CHARS + 17
    assert label.encode().decode() == label
    assert label_of_request(label) == label  # `kvfetch why` takes what a server shows
    assert label_of_request(request_id + "y") != label


def test_models_are_named_as_they_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = f"{tmp_path}/models--org--llama-1b/snapshots/0123abc"
    assert label_of_model("org/llama", "org/llama") == "org/llama"
    assert label_of_model("/models/llama-70b/", "/models/llama-70b/") == "llama-70b"
    assert label_of_model(cached, cached) == "org/llama-1b"
    assert label_of_model("\udc80" + "x" * 500, "m") == ("\\udc80" + "x" * 500)[:MAX_LABEL_CHARS]
    assert Labels().model_name("id:mine") == "mine"
    assert Labels("chat").model_name("id:mine") == "chat"
    (tmp_path / "models" / "llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert label_of_model("models/llama", "models/llama") == "llama"


@pytest.mark.parametrize(
    ("name", "model", "label"),
    [
        *((name, "id:mine", "org/llama") for name in ("org/llama", "llama", "id:mine", "mine")),
        ("/models/llama", "id:mine", "llama"),
        *((name, "weights:12ab", "") for name in ("weights:12ab", "12ab")),
    ],
)
def test_what_people_write_names_a_model(name: str, model: str, label: str) -> None:
    assert are_named(name, model, Labels(label))
    assert not are_named(name + "-2", model, Labels(label))
    assert not are_named("", model, Labels(label))
