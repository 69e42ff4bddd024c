"""Makes an environment beside ours with the oldest versions that pyproject.toml declares, to run tests with.

``python -m harness.lowest`` prints its Python. What is not installed there, and what those versions need, is found in
our environment behind it: a folder of a second environment that leads to the first.
"""

from __future__ import annotations

import hashlib
import sysconfig
import tomllib
import venv
from pathlib import Path

from packaging.requirements import Requirement

from harness.beside import make_once, run

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
USERS_EXTRAS = ("codec", "s3", "tracing", "bench")
# What SGLang pins, whose releases are gigabytes: our environment has the oldest that is declared.
OURS = ("torch", "transformers")


def declared() -> list[Requirement]:
    """Return the requirements of the package, and of the extras for users that need no GPU."""
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = project["optional-dependencies"]
    lines = [*project["dependencies"], *(line for extra in USERS_EXTRAS for line in extras[extra])]
    return [Requirement(line) for line in lines if not line.startswith("sgl-kvfetch[")]


def lowest_version(requirement: Requirement) -> str:
    """Return the only lower bound of a requirement."""
    (version,) = (each.version for each in requirement.specifier if each.operator == ">=")
    return version


def lowest_python() -> Path:
    """Return the Python of the environment, made if it is not there yet. Raises RuntimeError, with what pip says."""
    pins = sorted(f"{each.name}{_extras(each)}=={lowest_version(each)}" for each in declared() if each.name not in OURS)
    digest = hashlib.sha256("\n".join(pins).encode()).hexdigest()
    return make_once("lowest", digest[:16], lambda folder: _make(folder, pins)) / "bin" / "python"


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _make(folder: Path, pins: list[str]) -> None:
    venv.create(folder)
    site_packages = next(folder.glob("lib/python*/site-packages"))
    ours = sysconfig.get_path("purelib")
    site_packages.joinpath("ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, *pins], folder)


if __name__ == "__main__":
    try:
        print(lowest_python())
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
