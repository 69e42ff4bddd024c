from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from sgl_kvfetch.errors import FormatError, NamespaceMismatchError
from sgl_kvfetch.keys import (
    ContentCheck,
    HeadSlice,
    Namespace,
    SegmentKey,
    buddy_split,
    is_power_of_two,
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


@settings(deadline=None)
@given(a=st.integers(0, 2000), b=st.integers(0, 2000))
def test_a_longer_prefix_keeps_the_long_segments_of_a_shorter_one(a: int, b: int) -> None:
    shorter, longer = sorted((a, b))
    short = {s for s in buddy_split(0, shorter, 64) if s[1] == 64}
    assert short <= set(buddy_split(0, longer, 64))


def test_examples() -> None:
    assert list(buddy_split(0, 39, 512)) == [(0, 32), (32, 4), (36, 2), (38, 1)]
    assert list(buddy_split(39, 25, 512)) == [(39, 1), (40, 8), (48, 16)]


def test_every_field_of_a_namespace_counts() -> None:
    namespace = make_heads().namespace
    for field in fields(Namespace):
        value = getattr(namespace, field.name)
        change: dict[str, Any] = {field.name: value + "x" if isinstance(value, str) else value + 1}
        other = replace(namespace, **change)
        assert other.digest() != namespace.digest()
        with pytest.raises(NamespaceMismatchError, match=f": {field.name} is "):
            namespace.require_same(other)
    namespace.require_same(make_heads().namespace)


def test_other_heads_are_stored_elsewhere() -> None:
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


def test_siblings_are_few_whatever_folders_there_are() -> None:
    """Each of them is asked in every lookup, and whoever may write can make folders."""
    namespace = replace(make_heads().namespace, num_heads=8)
    folders = [f"{namespace.digest()}.{start}-{stop}" for start in range(40) for stop in range(40)]
    found = HeadSlice(namespace, range(8)).siblings(folders)
    assert len(found) == 2 + 4 + 8  # ranks of TP=2, 4 and 8


SPACE = "ab" * 16 + ".0-8"


def test_object_names() -> None:
    key = SegmentKey(SPACE, 32, bytes(range(32)))
    manifest = parse_object_name(key.manifest_name)
    assert manifest.segment == key
    assert manifest.is_manifest
    data = parse_object_name(key.data_name("cd" * 16))
    assert data.segment == key
    assert data.content_digest == "cd" * 16


@pytest.mark.parametrize(
    "name",
    [
        "",
        "/",
        "../../etc/passwd",
        f"{SPACE}/../x.kvm",
        f"{SPACE}/0-{'00' * 32}.kvm",
        f"{SPACE}/1-{'00' * 32}",
        f"{SPACE}/1-{'00' * 32}.kvm\n",
        f"{SPACE}/1-{'00' * 32}.xyz.kvd",
        f"{'AB' * 16}.0-8/1-{'00' * 32}.kvm",
        f"{'ab' * 16}/1-{'00' * 32}.kvm",
        f"{'ab' * 16}.0-/1-{'00' * 32}.kvm",
    ],
)
def test_other_names_are_refused(name: str) -> None:
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
