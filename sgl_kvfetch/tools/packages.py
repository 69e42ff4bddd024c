"""Names the package that a command lacks, and says how to install it.

Without extras, only what ``kvfetch serve`` needs is installed. Commands import the rest where they work with it, and
`ModuleNotFoundError` is translated once, for all commands, in ``app.py``.
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
    """Return the command that installs a package: by this project's extra that has it, if one has."""
    distribution = _DISTRIBUTIONS.get(package, package)
    return f"{sys.executable} -m pip install {_wanted_by(distribution)}"


def _wanted_by(distribution: str) -> str:
    """Return what pip is to install for the sake of a distribution."""
    for line in importlib.metadata.requires(_PROJECT) or []:
        name, _, marker = line.partition(";")
        if re.split(r"[^\w.-]", name)[0] == distribution:
            extra = re.search(r"extra == [\"'](\w+)[\"']", marker)
            return f"'{_PROJECT}[{extra[1]}]'" if extra else _PROJECT
    return distribution
