"""Names the package that a command lacks, and says how to install it.

A store's machine has only what ``kvfetch serve`` needs (deploy/requirements-store.txt). Commands import the rest where
they work with it, and `ModuleNotFoundError` is translated once, for all commands, in ``app.py``.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys

from sgl_kvfetch.errors import ConfigError

_PROJECT = "sgl_kvfetch"
_DISTRIBUTIONS = {"PIL": "pillow"}  # packages whose distribution has another name


def missing_package(error: ModuleNotFoundError) -> str:
    """Return the name of the package that is not installed. Raise ``error`` again if the module is one of ours."""
    package = (error.name or _PROJECT).partition(".")[0]
    if package == _PROJECT:
        raise error
    return package


def needs_package(what: str, error: ModuleNotFoundError) -> ConfigError:
    """Return the error of ``what``, which cannot run without the package that ``error`` names."""
    package = missing_package(error)
    return ConfigError(
        f"{what} needs {package}, which is not installed here: {how_to_install(package)}, or run it on a machine "
        "that has SGLang"
    )


def how_to_install(package: str) -> str:
    """Return the command that installs a package: one of ours comes with all that this project requires."""
    distribution = _DISTRIBUTIONS.get(package, package)
    return f"{sys.executable} -m pip install {_PROJECT if distribution in _required() else distribution}"


def _required() -> set[str]:
    """Return the names of the distributions that this project requires, without those of its extras."""
    requirements = importlib.metadata.requires(_PROJECT) or []
    return {re.split(r"[^\w.-]", each)[0] for each in requirements if "extra ==" not in each}
