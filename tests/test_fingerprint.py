from pathlib import Path

import pytest

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.fingerprint import fingerprint_model


def make_model(folder: Path, weights: bytes = b"w" * 5000, config: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "model-1.safetensors").write_bytes(weights)
    (folder / "model-2.safetensors").write_bytes(b"")
    (folder / "config.json").write_text(config)
    (folder / "README.md").write_text(str(folder))
    return folder


def test_equal_files_anywhere_are_the_same_model(tmp_path: Path) -> None:
    assert fingerprint_model(str(make_model(tmp_path / "a"))) == fingerprint_model(str(make_model(tmp_path / "b")))


def test_one_bit_of_the_weights_or_the_config_makes_another_model(tmp_path: Path) -> None:
    models = [
        make_model(tmp_path / "a"),
        make_model(tmp_path / "b", weights=b"w" * 4999 + b"v"),
        make_model(tmp_path / "c", config='{"rope_theta": 1}'),
    ]
    assert len({fingerprint_model(str(m)) for m in models}) == 3


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


def test_no_weights_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"no weight files found .* set model_id"):
        fingerprint_model(str(tmp_path))


def test_an_unknown_repository_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnsupportedError, match=r"neither a directory nor in the local .* cache; set model_id"):
        fingerprint_model("nobody/nothing-of-that-name")
