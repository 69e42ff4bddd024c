"""Fingerprint a model's weights, so that different models of the same name never share a namespace."""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from sgl_kvfetch.errors import UnsupportedError

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf"})
# Files besides the weights that affect K and V: shapes, quantisation of the weights, and the model's own code.
CONFIG_FILES = frozenset(
    {"config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json"}
)
CODE_SUFFIX = ".py"

# Cached digests by path, size, mtime and inode, so that attaching again does not read the files again.
_known: dict[tuple[Path, int, int, int], str] = {}

_SHA256 = re.compile("[0-9a-f]{64}")


def fingerprint_model(model_path: str, revision: str | None = None) -> str:
    """Return 32 hex digits over the names and contents of a model's weight files, configs and code, with subfolders.

    ``model_path`` is a directory, a weight file, or the name of a repository in the local Hugging Face cache. Every
    byte is read once, except in files that the cache names by their digest. Raises UnsupportedError if there are no
    weights.
    """
    folder, files = _model_files(model_path, revision)
    if not any(f.suffix in WEIGHT_SUFFIXES for f in files):
        raise UnsupportedError(
            f"no weight files found for {model_path!r}, so other weights of that name could not be told apart; "
            "set model_id in the kvfetch config to a name of your own for these weights"
        )
    return digest_files(folder, files)


def model_folder(model_path: str, revision: str | None = None) -> Path:
    """Return the folder with a model's files, or that of its only file. Raises UnsupportedError."""
    return _model_files(model_path, revision)[0]


def digest_files(folder: Path, files: Sequence[Path]) -> str:
    """Return 32 hex digits over the names of these files in ``folder`` and their contents."""
    with ThreadPoolExecutor(4, "kvfetch-hash") as pool:
        digests = zip(files, pool.map(digest_file, files), strict=True)
        lines = [f"{file.relative_to(folder).as_posix()}\0{digest}\n" for file, digest in digests]
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def _model_files(model_path: str, revision: str | None) -> tuple[Path, list[Path]]:
    """Return the model's folder, and the files in it that determine K and V."""
    path = Path(model_path)
    if path.is_file():
        return path.parent, [path]
    if not path.is_dir():
        path = _cached_repository(model_path, revision)
    return path, sorted(f for f in path.rglob("*") if _matters(f.relative_to(path)) and f.is_file())


def _matters(name: Path) -> bool:
    if any(part.startswith(".") for part in name.parts):  # version control and caches
        return False
    return name.suffix in WEIGHT_SUFFIXES or name.suffix == CODE_SUFFIX or name.name in CONFIG_FILES


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


def digest_file(file: Path) -> str:
    """Return a digest of a file's content, from its name or the cache if possible."""
    target = file.resolve()
    if _SHA256.fullmatch(target.name):  # the Hugging Face cache names large files by their SHA-256
        return target.name
    stat = target.stat()
    if stat.st_size == 0:
        return "empty"
    key = (target, stat.st_size, stat.st_mtime_ns, stat.st_ino)
    if (digest := _known.get(key)) is None:
        with target.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            digest = _known[key] = xxhash.xxh3_128_hexdigest(mapped)
    return digest
