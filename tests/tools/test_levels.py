"""The commands on segments whose coefficients are in levels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.errors import FormatError
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.codec.container.test_levels import KLT, LEVELS, cells, segment
from tests.tools.conftest import flip, kvfetch, kvfetch_json, put

ZSTD = make_targets(["zstd"], ["240p"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    put(tmp_path, segment())
    return tmp_path


def test_inspect_shows_levels(root: Path) -> None:
    name = f"{root}#{segment().manifest.key.manifest_name}"
    (shown,) = kvfetch_json("inspect", name)["segments"]
    (variant,) = shown["variants"]
    assert variant["level_bytes"] == [len(data) for data in segment().level_data]
    assert (variant["num_dropped_levels"], variant["missing"]) == (0, False)
    stored = len(segment().manifest.encode()) + sum(len(data) for _, data in segment().data_objects())
    assert variant["sizes"]["stored_bytes"] == stored
    (root / segment().manifest.data_name(segment().manifest.levels[1])).unlink()
    assert "some of this variant's data is MISSING" in kvfetch("inspect", name).output


def test_verify_reads_all_levels(root: Path) -> None:
    assert kvfetch("verify", str(root)).exit_code == 0
    flip(root / segment().manifest.data_name(segment().manifest.levels[-1]), -1)
    assert kvfetch("verify", str(root)).exit_code == 1


def test_verify_finds_levels_that_a_manifest_hides(root: Path) -> None:
    """A store, or whoever may write, leaves out the last level and does not say so."""
    manifest = segment().manifest
    (variant,) = manifest.variants
    hidden = msgspec.structs.replace(variant, levels=variant.levels[:-1])
    hiding = msgspec.structs.replace(manifest, variants=(hidden,))
    (root / manifest.key.manifest_name).write_bytes(hiding.encode())
    (root / manifest.data_name(manifest.levels[-1])).unlink()
    result = kvfetch("verify", str(root))
    assert result.exit_code == 1
    assert f"ladder has {LEVELS} levels, expected the manifest's {LEVELS - 1}" in result.output


def test_encode_makes_other_variants_of_all_levels_and_back(root: Path) -> None:
    result = kvfetch("encode", str(root), "--codec", "zstd", "--grace", "0")
    assert result.exit_code == 0, result.output
    (path,) = root.rglob("*.kvm")
    manifest = decode_manifest(path.read_bytes())
    assert [variant.codec for variant in manifest.variants] == ["zstd"]
    reader = SegmentReader(manifest, KLT)
    data = (root / reader.data_name).read_bytes()
    for cell, expected in zip(manifest.cells(), cells(segment()), strict=True):
        found = reader.decode_cell(cell, reader.chunks_in(cell, [data]))
        assert all(map(torch.equal, found, expected))


def test_encode_adds_video_beside_encrypted_levels(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("00" * 32)
    root, stored = tmp_path / "store", secure_segment(segment(), StoreKeys(bytes(32)))
    put(root, stored)
    options = "--codec", "ans,hevc", "--resolutions", "240p", "--key-file", str(keys)
    result = kvfetch("encode", str(root), *options, "--grace", "0")
    assert result.exit_code == 0, result.output
    manifest = decode_manifest((root / stored.manifest.key.manifest_name).read_bytes())
    levels, video = manifest.variants
    assert (levels, video.codec) == (stored.manifest.variants[0], "hevc")
    assert kvfetch("verify", str(root), "--key-file", str(keys)).exit_code == 0


def test_nothing_is_made_of_a_segment_that_has_lost_levels(root: Path) -> None:
    """It would pass for a whole one."""
    (variant,) = segment().manifest.variants
    lost = msgspec.structs.replace(segment().manifest, variants=(variant.with_levels(1),))
    (path,) = root.rglob("*.kvm")
    path.write_bytes(lost.encode())
    result = kvfetch("encode", str(root), "--codec", "zstd", "--grace", "0")
    assert result.exit_code == 0, result.output
    assert path.read_bytes() == lost.encode()
    with pytest.raises(FormatError, match="lost 1 levels"):
        transcode(lost, segment().data, ZSTD, levels=segment().level_data[:1])
