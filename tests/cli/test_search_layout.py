"""``kvfetch search-layout`` on a small random model."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import av
import pytest
import typer
from typer.testing import CliRunner, Result

from sgl_kvfetch.cli import _Commands, layout_search
from sgl_kvfetch.cli.search_layout import search_layout
from sgl_kvfetch.layout.choose import RESOLUTIONS
from sgl_kvfetch.layout.tiling import Tiling, layout_of
from sgl_kvfetch.quant.profile import load_profile
from tests.quant.profiles import make_profile

pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = 64

app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False)
app.command("search-layout")(search_layout)
app.callback()(lambda: None)


def kvfetch(*args: object) -> Result:
    result = CliRunner().invoke(app, ["search-layout", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    draw = random.Random(0)
    path.write_text(" ".join(f"w{draw.randrange(3, 2000)}" for _ in range(4 * TOKENS)))
    return path


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "model.profile"
    make_profile(num_layers=4, num_heads=2, head_dim=64, block_heads=2).save(path)
    return path


def options(model: Path, text: Path) -> list[object]:
    return ["--model", model, "--text", text, "--tokens", TOKENS, "--windows", 2, "--workers", 2]


def test_the_smallest_layouts_are_kept_in_the_profile(
    tiny_llama: Path, text: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_search, "MIN_GAIN", -1.0)
    out = tmp_path / "found.json"
    before = load_profile(profile)
    result = kvfetch(*options(tiny_llama, text), "--profile", profile, "--json", out)
    assert result.exit_code == 0, result.stderr
    after = load_profile(profile)
    found = json.loads(out.read_text())
    assert found["span_tokens"] == TOKENS
    assert found["quantiser"].startswith(f"klt(profile={before.digest}")
    assert after.digest == before.digest
    for tensor in ("k", "v"):
        tiling = after.tiling[tensor]
        assert isinstance(tiling, Tiling)
        candidates = [c for c in found["tensors"][tensor]["candidates"] if c["bits_per_value"] is not None]
        best = min((c for c in candidates if c["order"] == "stored"), key=lambda c: c["bits_per_value"])
        layout = layout_of(tiling, TOKENS)
        assert (best["layout"]["width"], best["layout"]["height"]) == (layout.width, layout.height)
        assert Tiling(**best["tiling"]) == tiling
        assert f"{best['bits_per_value']:.4f}" in result.stdout
        assert str(tiling) in result.stdout


def test_a_layout_that_gains_too_little_is_not_kept_nor_an_older_one(
    tiny_llama: Path, text: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = Tiling(head_rows=1, head_cols=2, dim_rows=8, dim_cols=8)
    load_profile(profile).with_tiling("k", older).with_tiling("v", older).save(profile)
    monkeypatch.setattr(layout_search, "MIN_GAIN", 1.0)
    result = kvfetch(*options(tiny_llama, text), "--profile", profile, "--tensor", "k")
    assert result.exit_code == 0, result.stderr
    assert "K is laid out channel-major" in result.stdout
    assert load_profile(profile).tiling == {"k": None, "v": older}


def test_a_dry_run_leaves_the_profile_alone(tiny_llama: Path, text: Path, profile: Path) -> None:
    before = profile.read_bytes()
    result = kvfetch(*options(tiny_llama, text), "--profile", profile, "--tensor", "v", "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert "layout of V" in result.stdout
    assert "layout of K" not in result.stdout
    assert profile.read_bytes() == before


def test_only_one_tensor_is_replaced(
    tiny_llama: Path, text: Path, profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout_search, "MIN_GAIN", -1.0)
    result = kvfetch(*options(tiny_llama, text), "--profile", profile, "--tensor", "k")
    assert result.exit_code == 0, result.stderr
    assert load_profile(profile).tiling["k"] is not None
    assert load_profile(profile).tiling["v"] is None


@pytest.mark.parametrize("quantiser", ["uint8", "cachegen"])
def test_quantisers_without_a_profile(quantiser: str, tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "sizes.png"
    args = ["--quantiser", quantiser, "--resolution", "480p", "--plot", plot]
    result = kvfetch(*options(tiny_llama, text), *args)
    assert result.exit_code == 0, result.stderr
    assert "near-square" in result.stdout
    with av.open(str(plot)) as container:
        picture = next(container.decode(video=0))
    assert picture.width > 1000
    assert picture.height > 500


def fails(*args: Any) -> str:
    result = kvfetch(*args)
    assert result.exit_code == 2, result.stdout
    return result.stderr


def test_wrong_input_is_named_before_any_work(
    tiny_llama: Path, text: Path, profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = options(tiny_llama, text)
    assert "klt needs --profile" in fails(*common)
    assert "--quantiser is uint8" in fails(*common, "--profile", profile, "--quantiser", "uint8")
    missing = tmp_path / "none" / "out"
    assert f"--json {missing}" in fails(*common, "--profile", profile, "--json", missing)
    assert f"--plot {missing}" in fails(*common, "--profile", profile, "--plot", missing)
    assert str(missing) in fails(*common, "--profile", missing)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "--plot needs matplotlib" in fails(*common, "--profile", profile, "--plot", tmp_path / "a.png")


def test_input_that_does_not_fit_is_named(tiny_llama: Path, text: Path, profile: Path, tmp_path: Path) -> None:
    common = options(tiny_llama, text)
    assert "windows of 4096 tokens" in fails(*common, "--profile", profile, "--tokens", 4096)
    assert "no-model" in fails("--model", tmp_path / "no-model", "--text", text, "--profile", profile)
    assert "no-text" in fails("--model", tiny_llama, "--text", tmp_path / "no-text", "--profile", profile)
    assert "target_kl = 1" in fails(*common, "--profile", profile, "--target-kl", 1)
    make_profile(num_layers=3, num_heads=2, head_dim=64, block_heads=2).save(profile)
    message = fails(*common, "--profile", profile)
    assert "3 layers of 2 KV heads of 64" in message
    assert "has 4 layers of 2 KV heads" in message


def test_the_resolutions_are_all_there() -> None:
    from sgl_kvfetch.cli.search_layout import Resolution

    assert [r.value for r in Resolution] == list(RESOLUTIONS)
