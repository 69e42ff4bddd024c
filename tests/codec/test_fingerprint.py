from pathlib import Path

import pytest

from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.errors import UnsupportedError


def make_model(folder: Path, weights: bytes = b"w" * 5000, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "model-1.safetensors").write_bytes(weights)
    (folder / "model-2.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(str(folder))
    return folder


def test_equal_files_anywhere_are_the_same_model_and_any_that_differ_make_another(tmp_path: Path) -> None:
    same = [fingerprint_model(str(make_model(tmp_path / name))) for name in "ab"]
    assert same[0] == same[1]
    changed = [
        make_model(tmp_path / "c", weights=b"w" * 4999 + b"v"),
        make_model(tmp_path / "d", config='{"rope_theta": 1}'),
    ]
    digests = [same[0], *(fingerprint_model(str(each)) for each in changed)]
    configs = "hf_quant_config.json", "quantize_config.json", "quantization_config.json"
    for name in (*configs, "modeling.py", "part/extra.safetensors"):
        file = tmp_path / "a" / name
        file.parent.mkdir(exist_ok=True)
        for content in ("1", "2"):
            file.write_text(content)
            digests.append(fingerprint_model(str(tmp_path / "a")))
    assert len(set(digests)) == len(digests) == 13


def test_names_of_subfolders_count_and_hidden_ones_do_not(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a")
    whole = fingerprint_model(str(model))
    (model / ".cache").mkdir()
    (model / ".cache" / "config.json").write_text("{}")
    assert fingerprint_model(str(model)) == whole
    digests = set()
    for folder in ("x", "y"):
        (model / folder).mkdir()
        (model / folder / "more.bin").write_bytes(b"w")
        digests.add(fingerprint_model(str(model)))
        (model / folder / "more.bin").unlink()
    assert len(digests | {whole}) == 3


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "a")
    first = fingerprint_model(str(model))
    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", lambda *args, **kwargs: pytest.fail("read again"))
        assert fingerprint_model(str(model)) == first
    (model / "model-1.safetensors").write_bytes(b"v" * 5000)
    assert fingerprint_model(str(model)) != first


def test_the_hugging_face_caches_file_names_are_digests(tmp_path: Path) -> None:
    """Large files there are links to blobs named by their SHA-256: those need not be read."""
    digests = []
    for name, sha in (("a", "ab" * 32), ("b", "cd" * 32)):
        folder = make_model(tmp_path / name)
        blob = tmp_path / sha
        blob.write_bytes(b"same")
        (folder / "model-1.safetensors").unlink()
        (folder / "model-1.safetensors").symlink_to(blob)
        digests.append(fingerprint_model(str(folder)))
    assert digests[0] != digests[1]


def test_what_has_no_fingerprint_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UnsupportedError, match=r"no weight files found .* set model_id"):
        fingerprint_model(str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedError, match=r"neither a directory nor in the local .* cache; set model_id"):
        fingerprint_model("nobody/nothing-of-that-name")
