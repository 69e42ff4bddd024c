"""``kvfetch calibrate`` on a small random model. That profiles serve is shown in ``tests/e2e/test_klt.py``."""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner, Result

from harness.models import make_tiny_lfm2, make_tiny_llama
from sgl_kvfetch import codec
from sgl_kvfetch.codec.calibrate import curve, sweep
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.directory.local import LocalStore
from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.prompts import text_digest
from sgl_kvfetch.stores import NoteKind
from sgl_kvfetch.tools.app import app


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("m"), num_layers=1, hidden_size=64, head_dim=32, vocab_size=128)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("t") / "words"
    file.write_text(" ".join(f"w{3 + i * i % 125}" for i in range(1000)))
    return file


def run(model: Path, text: Path, out: Path, *args: str) -> Result:
    command = ["calibrate", "--model", str(model), "--text", str(text), "-o", str(out)]
    command += ["--windows", "2", "--context", "64", "--continuation", "32", *args]
    return CliRunner().invoke(app, command)


def test_a_profile_is_written_and_described(model: Path, text: Path, tmp_path: Path) -> None:
    result = run(model, text, tmp_path / "p", "--part", "0.2:0.9", "--tp-size", "2")
    assert result.exit_code == 0, result.output
    profile = load_profile(tmp_path / "p")
    assert profile.digest in result.output
    assert profile.grid.cell_heads == 1  # of two
    assert profile.rotations is not None
    assert profile.calibration.weights == fingerprint_model(str(model))
    assert (profile.calibration.model, profile.calibration.part) == (model.name, "0.2:0.9")
    assert f"default target_kl is {profile.default_target_kl:.2g}." in result.output
    assert "accuracy: 1 of 1, 0 s left" in result.stderr  # where there is no terminal
    assert "Warning: 64 tokens are few for cells of" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--windows 40", "the text has 10 windows of 96 tokens, expected 40"),
        ("--part 1:0", "part '1:0': expected FROM:TO"),
        ("--context 4096", "--context and --continuation are 4128 tokens, the model has 4096 positions"),
        ("--tp-size 3", "--tp-size 3: cannot divide 2 KV heads evenly"),
        ("--model ./none", "no model with a tokenizer"),
        ("--out none/p", "expected a file in an existing directory"),
        ("--out other/p", "expected a file in an existing directory"),
        ("--worst-of chats", "the kinds of text ['chats'] are to count: expected some of ['words']"),
        ("--text dull=other:1.5", "text dull: its share is 1.5, expected more than 0 and at most 1"),
        ("--text dull=other:1.0.0", "expected [NAME=]FILE[:SHARE], with a number such as 0.5 as SHARE"),
    ],
)
def test_what_is_wrong_is_named(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(text, "other")
    result = run(model, text, tmp_path / "p", *args.split())
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not (tmp_path / "p").exists()


def test_a_profile_that_misses_the_default_is_not_published(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "_STEPS", (16.0, 32.0))
    store = tmp_path / "store"
    store.mkdir()
    result = run(model, text, tmp_path / "p", "--publish", str(store))
    assert result.exit_code == 2
    assert "no profile: the finest step" in result.stderr
    assert "serve this model with 'exact'" in result.stderr
    assert not (tmp_path / "p").exists()
    assert list(store.iterdir()) == []


def test_a_model_without_keys_and_values_is_named(text: Path, tmp_path: Path) -> None:
    result = run(make_tiny_lfm2(tmp_path / "m", ["conv"] * 2), text, tmp_path / "p")
    assert result.exit_code == 2
    assert "it has no layer with keys and values of all tokens" in result.stderr


def test_each_kind_of_text_is_measured_and_the_worst_chooses_the_step(model: Path, text: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.write_text(" ".join(f"w{3 + i % 7}" for i in range(1000)))
    args = ["--text", f"dull={other}:0.25", "--windows", "8"]
    result = run(model, text, tmp_path / "p", *args, "--json")
    assert result.exit_code == 0, result.output
    profile = load_profile(tmp_path / "p")
    kinds = [(kind.name, kind.num_windows, kind.num_held_out, kind.counts) for kind in profile.kinds]
    assert kinds == [("words", 6, 1, True), ("dull", 2, 1, True)]
    words, dull = (kind.kls for kind in profile.kinds)
    assert [point.kl for point in profile.curve] == [*map(max, words, dull)]
    assert words != dull
    assert profile.calibration.text == f"words ({text_digest(text)}), b ({text_digest(other)})"
    assert [kind["kls"] for kind in json.loads(result.stdout)["kinds"]] == [[*words], [*dull]]

    result = run(model, text, tmp_path / "q", *args, "--worst-of", "dull")
    assert result.exit_code == 0, result.output
    chosen = load_profile(tmp_path / "q")
    assert [kind.counts for kind in chosen.kinds] == [False, True]
    assert [point.kl for point in chosen.curve] == [*chosen.kinds[1].kls]
    assert chosen.digest != profile.digest  # it promises something else
    assert "words, does not count 6 1" in " ".join(result.output.split())
    shown = CliRunner().invoke(app, ["profile", "show", str(tmp_path / "q")]).output
    assert f"profile {chosen.digest} of {model.name}" in shown
    assert "words, does not count 6 1" in " ".join(shown.split())


def test_what_it_calibrates_on(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a text, four windows of each kind of the default one. With a chat template, windows begin as texts and as
    messages do."""
    seen: dict[str, list[torch.Tensor]] = {}

    def no_calibration(model: object, windows: dict[str, list[torch.Tensor]], *args: object) -> None:
        seen.update(windows)
        raise ConfigError("enough")

    monkeypatch.setattr(codec, "calibrate_model", no_calibration)
    command = ["calibrate", "--model", str(model), "--context", "64", "--continuation", "32", "--out"]
    assert "enough" in CliRunner().invoke(app, [*command, str(tmp_path / "p")]).stderr
    names = "english german russian arabic chinese japanese code tools chats"
    assert {name: len(windows) for name, windows in seen.items()} == dict.fromkeys(names.split(), 4)

    own = shutil.copytree(model, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.chat_template = "{% for m in messages %}w90 w91 {{ m.content }} w92{% endfor %}"
    tokenizer.save_pretrained(own)
    assert "enough" in run(own, text, tmp_path / "p", "--windows", "5").stderr
    assert {len(window) for window in seen["words"]} == {96}
    assert [w[:2].tolist() == [90, 91] for w in seen["words"]] == [False, True, False, True, False]


def test_a_profile_is_published(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that fails in the end, the profile is not lost."""
    store, temp = tmp_path / "store", tmp_path / "temp"
    for folder in (store, temp):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temp))
    command = ["calibrate", "--model", str(model), "--text", str(text)]
    command += ["--windows", "2", "--context", "64", "--continuation", "32"]
    assert "give --publish STORE, --out FILE, or both" in CliRunner().invoke(app, command).output
    assert "is not a directory" in CliRunner().invoke(app, [*command, "--publish", str(tmp_path / "none")]).output
    command += ["--publish", str(store)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    (path,) = (store / ".profiles" / fingerprint_model(str(model))).iterdir()
    assert f"published {path.parent.name}/{path.name}; servers that start with this model take it" in result.output
    assert list(temp.iterdir()) == []

    async def fail(store: LocalStore, kind: NoteKind, name: str, data: bytes) -> None:
        raise StoreError("full", "no room")

    monkeypatch.setattr(LocalStore, "put_note", fail)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    (kept,) = temp.rglob("*.profile")
    assert load_profile(kept).digest == path.name
    assert f"no room; the profile is in {kept}; kvfetch profile put {store} {kept} publishes it" in result.output


def test_a_disk_that_is_full_in_the_end_loses_no_profile(
    model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here, a folder that is gone. Nor does it end a calibration that nobody has interrupted."""
    out = tmp_path / "folder" / "p"
    out.parent.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sweep, "_EVERY_S", 0.0)
    pass_layer = sweep.Sweep.pass_layer

    def pass_without_folder(self: sweep.Sweep, index: int) -> object:
        shutil.rmtree(out.parent)
        return pass_layer(self, index)

    monkeypatch.setattr(sweep.Sweep, "pass_layer", pass_without_folder)
    said = run(model, text, out).stderr
    assert "what is calibrated so far cannot be kept in" in caplog.text
    (kept,) = tmp_path.rglob("*.profile")
    assert f"{out} cannot be written: No such file or directory; the profile is in {kept}" in said
    assert load_profile(kept).grid.num_layers == 1
