"""``kvfetch profile``, on a chunk that is small enough to be quick."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from sgl_kvfetch.adapt.profile import decode_profile, load_decode_profile
from sgl_kvfetch.cli import app

SMALL = ("--tokens", 32, "--heads", 2, "--head-dim", 64, "--rounds", 1)


def kvfetch(*args: object) -> Result:
    return CliRunner().invoke(app, ["profile", *map(str, (*SMALL, *args))])


def test_it_measures_every_codec_and_resolution(tmp_path: Path) -> None:
    path = tmp_path / "decode.json"
    result = kvfetch("--resolutions", "240p,480p", "--concurrency", 2, "--out", path)
    assert result.exit_code == 0, result.output
    assert "hevc 480p" in result.stdout
    profile = load_decode_profile(path)
    assert {v.name for v in profile.variants} == {"hevc 240p", "hevc 480p", "zstd"}
    assert profile.max_concurrency == 2
    assert profile.chunk_values == 32 * 3 * 2 * 64
    sizes = [v.size_bytes for v in profile.variants]
    assert sizes == sorted(sizes)
    assert "synthetic" in profile.source


def test_json_is_the_profile_itself() -> None:
    result = kvfetch("--codecs", "zstd", "--concurrency", 1, "--json")
    assert result.exit_code == 0, result.output
    assert [v.name for v in decode_profile(result.stdout.encode()).variants] == ["zstd"]
    assert json.loads(result.stdout)["version"] == 1


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for args, message in (
        (("--codecs", "vp9"), "'vp9' is unknown"),
        (("--resolutions", "4k"), "'4k' is unknown"),
        (("--out", tmp_path / "nowhere" / "decode.json"), "there is no directory"),
    ):
        result = kvfetch(*args)
        assert result.exit_code == 2
        assert message in result.stderr
