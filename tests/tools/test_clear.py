from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.serving import serving
from harness.small_segments import head_slice, make_segment, page_hashes
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.stores.http import HttpStore
from sgl_kvfetch.stores.notes import Pin, put_pin
from sgl_kvfetch.tools.terminal import format_size
from tests.segments import names, put_all, using
from tests.tools.conftest import kvfetch, kvfetch_json, said as told, unchanged

CHAIN = page_hashes(4)
A, B = (head_slice(model).folder for model in "ab")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A directory with a segment of each of two models."""
    put_all(LocalStore(tmp_path), *(make_segment(CHAIN, 0, 4, model=model) for model in ("a", "b")))
    return tmp_path


def folders(root: Path) -> set[str]:
    return {name.partition("/")[0] for name in using(LocalStore(root), names)}


@pytest.mark.parametrize(
    ("part", "options", "said", "left"),
    [
        ("", ("--yes",), "2 segments, ... 4 objects deleted", set()),
        (f"#{A}", ("--yes",), "1 segments, ... 2 objects deleted", {B}),
        ("", ("--model", "a", "--yes"), "1 segments, ... 2 objects deleted", {B}),
        ("", ("--dry-run",), "2 segments, ", {A, B}),
    ],
)
def test_what_goes_and_what_stays(store: Path, part: str, options: tuple[str, ...], said: str, left: set[str]) -> None:
    output = told("clear", f"{store}{part}", *options)
    assert all(words in output for words in said.split(" ... "))
    assert folders(store) == left


@pytest.mark.parametrize(
    ("options", "exit_code", "said"),
    [((), 2, "add --yes"), (("--model", "", "--yes"), 1, "nothing is stored of --model ''; stored: a, b")],
)
def test_nothing_goes(store: Path, options: tuple[str, ...], exit_code: int, said: str) -> None:
    """Without an answer, or of a model that is not stored."""
    with unchanged(store):
        result = kvfetch("clear", str(store), *options)
    assert (result.exit_code, said in result.stderr) == (exit_code, True)


def test_data_without_a_manifest_is_no_segment(store: Path) -> None:
    """A writer that crashed has left it."""
    (manifest,) = (store / A).glob("*.kvm")
    manifest.unlink()
    (data,) = (store / A).iterdir()
    size = data.stat().st_size
    planned = kvfetch_json("clear", str(store), "--dry-run")
    assert [planned[key] for key in ("num_segments", "num_orphans", "orphan_bytes")] == [1, 1, size]
    said = f"; 1 data objects without a manifest, {format_size(size)}"
    assert said in kvfetch("clear", str(store), "--dry-run").output
    assert kvfetch_json("clear", str(store), "--yes") == {**planned, "num_objects": 3}
    assert folders(store) == set()


def test_pinned_segments_stay_unless_they_are_asked_for(store: Path) -> None:
    chain = page_hashes(12)  # of which a part in the middle is gone
    put_all(LocalStore(store), make_segment(page_hashes(4, "x"), 0, 4), make_segment(chain, 8, 4, model="a"))
    using(LocalStore(store), lambda opened: put_pin(opened, Pin("pinned", 16, b"".join(chain))))
    assert "3 pinned segments stay; --pinned deletes them, too" in told("clear", str(store), "--yes")
    assert folders(store) == {A, B}

    assert "6 objects deleted" in kvfetch("clear", str(store), "--yes", "--pinned").output
    assert folders(store) == set()
    assert "pinned" in kvfetch("pin", str(store)).output


def test_what_is_pinned_while_the_user_thinks_stays(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin_and_agree(err: bool) -> None:
        with ThreadPoolExecutor(1) as another:
            another.submit(using, HttpStore(url), lambda opened: put_pin(opened, pin)).result()

    pin = Pin("pinned", 16, b"".join(CHAIN))
    monkeypatch.setattr("sgl_kvfetch.tools.clear.ask_to_delete", pin_and_agree)
    with serving(store) as url:
        assert "nothing was deleted: more segments are pinned" in kvfetch("clear", url).stderr
    assert folders(store) == {A, B}
