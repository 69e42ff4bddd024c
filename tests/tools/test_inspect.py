import os
import time
from pathlib import Path
from typing import Any

import pytest

from harness.small_segments import expiring
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.keys import Labels
from sgl_kvfetch.tools.terminal import format_size
from sgl_kvfetch.types import KVGeometry
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
    exact, uint8 = (next(n for n in shown["namespaces"] if n["digest"] == d) for d in digests)
    assert [exact[f"num_{what}"] for what in ("segments", "pages", "tokens")] == [2, 5, 20]
    assert exact["namespace"]["quantiser"] == "exact"
    assert exact["sizes"]["raw_bytes"] == 5 * SMALL.page_bytes
    files = sizes[digests[0]]
    assert exact["stored_bytes"] == exact["sizes"]["stored_bytes"] == files
    assert exact["sizes"]["ratio"] == pytest.approx(5 * SMALL.page_bytes / files)
    assert exact["sizes"]["bits_per_value"] == pytest.approx(16 * files / (5 * SMALL.page_bytes))
    assert exact["oldest_s"] == pytest.approx(now_s - 3 * 86400)
    assert exact["newest_s"] == pytest.approx(now_s - 7200)
    assert uint8["num_segments"] == 1
    assert uint8["oldest_s"] == uint8["newest_s"] == pytest.approx(now_s - 60)
    assert shown["num_orphans"] == 0
    for text in ("exact", "uint8", "mha bfloat16, 4 layers x 2 heads x 48/64, page 4", "3 days"):
        assert text in table


def test_names_for_people_are_shown_and_those_that_identify_are_in_json(tmp_path: Path, stored: Stored) -> None:
    segment = with_labels(stored.segments[0], Labels("org/llama", "klt 6.5e-4"))
    put(stored.root, segment)
    shown = kvfetch("inspect", str(stored.root)).stdout
    assert "org/llama" in shown
    assert "klt 6.5e-4" in shown
    (namespace,) = (each for each in inspect_json(stored.url)["namespaces"] if each["model"] == "org/llama")
    assert namespace["quantiser"] == "klt 6.5e-4"
    assert namespace["namespace"]["quantiser"] == "exact"
    one = kvfetch("inspect", f"{stored.url}#{segment.manifest.key.stem}").stdout
    assert "model's label" in one
    assert "org/llama" in one


@pytest.mark.parametrize(("heads", "shown"), [(range(3), "heads 0-2,"), (range(2, 3), "heads 2,")])
def test_heads_are_shown_as_layers_are_by_the_first_and_the_last(tmp_path: Path, heads: range, shown: str) -> None:
    geometry = KVGeometry(30, 3, k_head_dim=8, v_head_dim=8, page_size=4, dtype="bfloat16")
    put(tmp_path, make_segment(geometry, heads=heads)[0])
    assert f"{shown} layers 0-29" in kvfetch("inspect", str(tmp_path)).stdout


def test_a_namespace_without_a_readable_manifest_is_still_shown(stored: Stored) -> None:
    stored.manifest_path(2).write_bytes(b"nonsense" * 10)
    shown = inspect_json(stored.url)
    broken = next(n for n in shown["namespaces"] if n["namespace"] is None)
    assert broken["num_segments"] == 1
    assert broken["sizes"] is None
    table = kvfetch("inspect", stored.url).stdout
    assert "no readable manifest" in table
    model = stored.segments[0].manifest.namespace.model
    num_bytes = {n["namespace"] and n["namespace"]["model"]: n["stored_bytes"] for n in shown["namespaces"]}
    assert f"{format_size(num_bytes[model])} of {model}\n" in table
    assert f"{format_size(num_bytes[None])} of namespaces without a readable manifest\n" in table


def test_a_namespace_is_shown_by_segment_the_longest_first(stored: Stored) -> None:
    prefix = stored.segments[0].manifest.key.namespace[:8]
    shown = inspect_json(f"{stored.url}#{prefix}")
    assert [s["num_pages"] for s in shown["segments"]] == [4, 1]
    assert shown["num_more"] == 0
    few = inspect_json(f"{stored.url}#{prefix}", "--limit", "1")
    assert few == {**shown, "segments": shown["segments"][:1], "num_more": 1}
    result = kvfetch("inspect", f"{stored.url}#{prefix}", "--limit", "1")
    assert "1 more segments" in result.stdout
    # What the table shows is a prefix of the name.
    name = result.stdout.splitlines()[0] + next(
        line.split()[0] for line in result.stdout.splitlines() if line.strip().startswith("4-")
    )
    assert segment_json(f"{stored.url}#{name}")["num_pages"] == 4


def test_in_a_namespace_damage_and_orphans_are_named(stored: Stored) -> None:
    first, second = (stored.segments[index].manifest.key for index in (0, 1))
    stored.manifest_path(0).write_bytes(b"nonsense" * 10)
    stored.manifest_path(1).unlink()
    put(stored.root, make_segment(num_pages=8)[0])
    shown = inspect_json(f"{stored.url}#{first.namespace}")
    assert [s["num_pages"] for s in shown["segments"]] == [8]
    assert shown["unreadable"].keys() == {first.manifest_name}
    assert shown["num_orphans"] == 1
    assert shown["orphan_bytes"] == len(stored.segments[1].data)
    text = kvfetch("inspect", f"{stored.url}#{second.namespace}").stdout
    assert f"{first.manifest_name}: " in text
    assert "1 data objects" in text


@pytest.mark.parametrize("suffix", ["", ".kvm", "data"])
def test_a_segment_is_shown_in_full(stored: Stored, suffix: str) -> None:
    segment = stored.segments[2]
    name = segment.data_name if suffix == "data" else segment.manifest.key.stem + suffix
    shown = segment_json(f"{stored.url}#{name}")
    manifest_bytes = len(segment.manifest.encode())
    assert shown["num_tokens"] == 8
    assert shown["num_spans"] == 2
    assert shown["manifest_bytes"] == manifest_bytes
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
    result = kvfetch("inspect", segment)
    assert result.exit_code == 0
    for text in ("byte 0", "byte 1", "hevc", "against raw", "bits per value", "4 pages of 4 tokens"):
        assert text in result.stdout
    assert "MISSING" not in result.stdout
    assert "expires" not in result.stdout
    stored.data_path(0).unlink()
    stored.manifest_path(0).write_bytes(expiring(stored.segments[0], 1_800_000_000).manifest.encode())
    shown = kvfetch("inspect", segment).stdout
    assert "MISSING" in shown
    assert "2027-01-15 08:00:00 UTC" in shown
    assert segment_json(segment)["expires"] == 1_800_000_000


def test_encrypted_segments_are_shown_with_the_key(tmp_path: Path, key_file: Path) -> None:
    segment = secure_segment(make_segment(codec="hevc")[0], KEYS)
    put(tmp_path / "store", segment)
    url, key = (tmp_path / "store").as_uri(), ("--key-file", str(key_file))

    def codecs(*args: str) -> set[str]:
        (variant,) = segment_json(f"{url}#{segment.manifest.key.stem}", *args)["variants"]
        return {codec for part in variant["parts"] for codec in part["codecs"]}

    assert codecs() == {"aes-256-gcm"}
    assert codecs(*key) >= {"hevc"}
    shown = kvfetch("inspect", f"{url}#{segment.manifest.key.stem}").stdout
    assert "encrypted with" in shown
    assert KEYS.ids[0] in shown


def test_odd_texts_of_writers_end_no_command(tmp_path: Path) -> None:
    segments = list(odd_segments())
    for segment in segments:
        put(tmp_path, segment)
    for command, exit_code in (("inspect", 0), ("verify", 1)):  # some are no quantiser's
        for options in ((), ("--json",)):
            shown = kvfetch(command, str(tmp_path), *options)
            assert shown.exit_code == exit_code, shown.output
            assert "\x1b" not in shown.output
    for segment in segments:
        shown = kvfetch("inspect", f"{tmp_path}#{segment.manifest.key.manifest_name}")
        assert shown.exit_code == 0, shown.output
        assert "\x1b" not in shown.output
