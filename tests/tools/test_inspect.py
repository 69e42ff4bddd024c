import os
import time
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from harness.small_segments import expiring
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.tools.terminal import format_size
from tests.odd_segments import odd_segments
from tests.segments import SMALL, make_segment, with_labels
from tests.tools.conftest import KEYS, Stored, kvfetch, kvfetch_json, put, unchanged


def inspect_json(*args: str) -> Any:
    return kvfetch_json("inspect", *args)


def segment_json(*args: str) -> Any:
    (segment,) = inspect_json(*args)["segments"]
    return segment


def test_a_store_is_shown_by_namespace_the_largest_first(stored: Stored) -> None:
    now_s = time.time()
    for index, age_s in enumerate((3 * 86400, 7200, 60)):
        os.utime(stored.manifest_path(index), (now_s - age_s,) * 2)
    digests = [stored.segments[index].manifest.key.namespace for index in (0, 2)]
    sizes = {d: sum(p.stat().st_size for p in (stored.root / d).iterdir()) for d in digests}  # manifests, too
    with unchanged(stored.root):
        shown = inspect_json(stored.url)
        table = kvfetch("inspect", str(stored.root)).stdout
    assert [n["digest"] for n in shown["namespaces"]] == sorted(digests, key=lambda d: -sizes[d])
    (exact,) = (each for each in shown["namespaces"] if each["digest"] == digests[0])
    assert [exact[f"num_{what}"] for what in ("segments", "pages", "tokens")] == [2, 5, 20]
    assert exact["namespace"]["quantiser"] == "exact"
    assert exact["sizes"]["raw_bytes"] == 5 * SMALL.page_bytes
    files = sizes[digests[0]]
    assert exact["stored_bytes"] == exact["sizes"]["stored_bytes"] == files
    assert exact["sizes"]["ratio"] == pytest.approx(5 * SMALL.page_bytes / files)
    assert exact["sizes"]["bits_per_value"] == pytest.approx(16 * files / (5 * SMALL.page_bytes))
    assert [exact["oldest_s"], exact["newest_s"]] == pytest.approx([now_s - 3 * 86400, now_s - 7200])
    assert shown["num_orphans"] == 0
    for text in ("uint8", "mha bfloat16, 4 layers x 2 heads x 48/64, page 4", "3 days"):
        assert text in table


def test_names_for_people_are_shown_and_those_that_identify_are_in_json(tmp_path: Path, stored: Stored) -> None:
    segment = with_labels(stored.segments[0], Labels("org/llama", "klt 6.5e-4"))
    put(stored.root, segment)
    shown = kvfetch("inspect", str(stored.root)).stdout
    assert "org/llama" in shown
    assert "klt 6.5e-4" in shown
    (namespace,) = (each for each in inspect_json(stored.url)["namespaces"] if each["model"] == "org/llama")
    assert (namespace["quantiser"], namespace["namespace"]["quantiser"]) == ("klt 6.5e-4", "exact")
    assert "org/llama" in kvfetch("inspect", f"{stored.url}#{segment.manifest.key.stem}").stdout


def test_a_namespace_is_shown_by_segment_the_longest_first(stored: Stored) -> None:
    prefix = stored.segments[0].manifest.key.namespace[:8]
    shown = inspect_json(f"{stored.url}#{prefix}")
    assert [s["num_pages"] for s in shown["segments"]] == [4, 1]
    assert shown["num_more"] == 0
    few = inspect_json(f"{stored.url}#{prefix}", "--limit", "1")
    assert few == {**shown, "segments": shown["segments"][:1], "num_more": 1}
    # What the table shows is a prefix of the name.
    folder, *lines = kvfetch("inspect", f"{stored.url}#{prefix}").stdout.splitlines()
    (name,) = (line.split()[0] for line in lines if line.strip().startswith("4-"))
    assert segment_json(f"{stored.url}#{folder}{name}")["num_pages"] == 4


def test_damage_and_orphans_are_named(stored: Stored) -> None:
    stored.manifest_path(2).write_bytes(b"nonsense" * 10)
    (broken,) = (each for each in inspect_json(stored.url)["namespaces"] if each["namespace"] is None)
    assert (broken["num_segments"], broken["sizes"]) == (1, None)
    size = format_size(broken["stored_bytes"])
    assert f"{size} of namespaces without a readable manifest\n" in kvfetch("inspect", stored.url).stdout

    first = stored.segments[0].manifest.key
    stored.manifest_path(0).write_bytes(b"nonsense" * 10)
    stored.manifest_path(1).unlink()
    put(stored.root, make_segment(num_pages=8)[0])
    shown = inspect_json(f"{stored.url}#{first.namespace}")
    assert [s["num_pages"] for s in shown["segments"]] == [8]
    assert shown["unreadable"].keys() == {first.manifest_name}
    assert (shown["num_orphans"], shown["orphan_bytes"]) == (1, len(stored.segments[1].data))
    text = kvfetch("inspect", f"{stored.url}#{first.namespace}").stdout
    assert f"{first.manifest_name}: " in text
    assert "1 data objects" in text


def test_segments_that_cannot_be_read_end_no_command(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is all that was asked for, others are evicted before they are read."""
    first, last = (stored.segments[index].manifest.key for index in (0, 2))
    stored.manifest_path(2).write_bytes(b"")
    assert f"{last.manifest_name}: manifest has 0 bytes" in kvfetch("inspect", f"{stored.url}#{last.stem}").stdout
    monkeypatch.setattr(LocalStore, "get", AsyncMock(return_value=None))
    unreadable = inspect_json(f"{stored.url}#{first.namespace}")["unreadable"]
    assert [*unreadable.values()] == ["it was deleted after it was listed"] * 2


@pytest.mark.parametrize("suffix", ["", ".kvm", "data"])
def test_a_segment_is_shown_in_full(stored: Stored, suffix: str) -> None:
    segment = stored.segments[2]
    name = segment.data_name if suffix == "data" else segment.manifest.key.stem + suffix
    shown = segment_json(f"{stored.url}#{name}")
    manifest_bytes = len(segment.manifest.encode())
    assert [shown[key] for key in ("num_tokens", "num_spans", "manifest_bytes")] == [8, 2, manifest_bytes]
    assert shown["sizes"]["raw_bytes"] == 2 * SMALL.page_bytes
    assert shown["sizes"]["stored_bytes"] == manifest_bytes + len(segment.data)
    (variant,) = shown["variants"]
    assert sum(part["stored_bytes"] for part in variant["parts"]) == len(segment.data)
    assert [(p["part"], p["num_chunks"]) for p in variant["parts"]] == [
        (part, len(list(segment.manifest.cells()))) for part in ("k scales", "k", "v scales", "v")
    ]
    num_values = 8 * SMALL.num_layers * SMALL.num_heads * (SMALL.k_head_dim + SMALL.v_head_dim)
    bits = sum(part["bits_per_value"] for part in variant["parts"])
    assert bits == pytest.approx(8 * len(segment.data) / num_values)


def test_a_segment_is_shown_as_a_table(stored: Stored) -> None:
    segment = f"{stored.url}#{stored.segments[0].manifest.key.stem}"
    assert segment_json(segment)["expires"] is None
    shown = kvfetch("inspect", segment).stdout
    assert all(text in shown for text in ("byte 1", "hevc", "against raw", "4 pages of 4 tokens"))
    assert "MISSING" not in shown
    assert "expires" not in shown
    stored.data_path(0).unlink()
    stored.manifest_path(0).write_bytes(expiring(stored.segments[0], 1_800_000_000).manifest.encode())
    shown = kvfetch("inspect", segment).stdout
    assert "MISSING" in shown
    assert "2027-01-15 08:00:00 UTC" in shown


def test_encrypted_segments_are_shown_with_the_key(tmp_path: Path, key_file: Path) -> None:
    segment = secure_segment(make_segment(codec="hevc")[0], KEYS)
    put(tmp_path / "store", segment)
    url, key = (tmp_path / "store").as_uri(), ("--key-file", str(key_file))

    def codecs(*args: str) -> set[str]:
        (variant,) = segment_json(f"{url}#{segment.manifest.key.stem}", *args)["variants"]
        return {codec for part in variant["parts"] for codec in part["codecs"]}

    assert codecs() == {"aes-256-gcm"}
    assert codecs(*key) >= {"hevc"}
    assert KEYS.ids[0] in kvfetch("inspect", f"{url}#{segment.manifest.key.stem}").stdout


def test_odd_texts_of_writers_end_no_command(tmp_path: Path) -> None:
    commands = [("inspect", str(tmp_path), 0), ("verify", str(tmp_path), 1)]  # some are no quantiser's
    for segment in odd_segments():
        put(tmp_path, segment)
        commands.append(("inspect", f"{tmp_path}#{segment.manifest.key.manifest_name}", 0))
    for command, target, exit_code in commands:
        for options in ((), ("--json",)):
            shown = kvfetch(command, target, *options)
            assert shown.exit_code == exit_code, shown.output
            assert "\x1b" not in shown.output
