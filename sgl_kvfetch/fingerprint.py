"""A digest of a model's weights: two models under one name never share a namespace."""

from __future__ import annotations

import mmap
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from sgl_kvfetch.errors import UnsupportedError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
# Files besides the weights that change what K and V are.
CONFIG_FILES = ("config.json",)

_SHA256 = re.compile("[0-9a-f]{64}")


def fingerprint_model(model_path: str, revision: str | None = None) -> str:
    """32 hex digits over the names and contents of a model's weight files and its config.

    ``model_path`` is a directory, a weight file, or the name of a repository in the local Hugging Face cache. Every
    byte is read, once, except where the cache's own file names already are digests. Raises UnsupportedError if there
    are no weights to be found.
    """
    files = _model_files(model_path, revision)
    if not any(f.suffix in WEIGHT_SUFFIXES for f in files):
        raise UnsupportedError(
            f"no weight files found for {model_path!r}, so they cannot be told from others of that name; "
            "set model_id in the kvfetch config to a name of your own for these weights"
        )
    with ThreadPoolExecutor(4) as pool:
        digests = pool.map(_file_digest, files)
        whole = xxhash.xxh3_128()
        for file, digest in zip(files, digests, strict=True):
            whole.update(f"{file.name}\0{digest}\n".encode())
    return whole.hexdigest()


def _model_files(model_path: str, revision: str | None) -> list[Path]:
    path = Path(model_path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        path = _cached_repository(model_path, revision)
    wanted = (f for f in path.iterdir() if f.suffix in WEIGHT_SUFFIXES or f.name in CONFIG_FILES)
    return sorted(f for f in wanted if f.is_file())


def _cached_repository(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download  # comes with sglang and transformers
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError) as e:
        raise UnsupportedError(
            f"the weights of {name!r} are neither a directory nor in the local Hugging Face cache; "
            "set model_id in the kvfetch config to a name of your own for these weights"
        ) from e


def _file_digest(file: Path) -> str:
    target = file.resolve().name
    if _SHA256.fullmatch(target):  # the Hugging Face cache names large files by their SHA-256
        return target
    if file.stat().st_size == 0:
        return "empty"
    with file.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return xxhash.xxh3_128_hexdigest(mapped)
