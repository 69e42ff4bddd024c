"""The package with the oldest versions that pyproject.toml declares, in an environment beside ours.

Making it takes half a minute. It imports all modules, and runs the tests of the houses that call others' packages: the
fast ones, and most of servers and stores. Left out are those that call only torch, SGLang, SQLite and our own code, and
nothing else that others do not call.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from harness.lowest import PROJECT, declared, lowest_python
from tests.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

# Older releases are surprised by newer ones of what they need.
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-W", "ignore::DeprecationWarning", "-p", "no:cacheprovider")
# With SGLang's servers, on a GPU, or with tests of their own.
NOT_HERE = {
    "sglang": "pinned exactly",
    "triton": "tests/triton_kernels compiles and runs all kernels with the oldest",
    "PyNvVideoCodec": "needs a GPU",
    "pytest": "runs these tests, pinned",
    "pytest-asyncio": "runs these tests, pinned",
}
# Of torch, Triton and SGLang, which are ours here, of Python, and of this repository's texts.
OF_OURS = (
    "tests/e2e",
    "tests/fuzz",
    "tests/triton_kernels",
    "tests/benchmarks/test_gpu_*",
    "tests/codec/calibrate",
    "tests/codec/quant",
    "tests/cpu_engine",
    "tests/directory",
    "tests/plane/calibration",
    "tests/plugin",
    "tests/test_docs.py",
    "tests/test_houses.py",
)
THEIR_SERVERS = ("tests/server", "tests/stores")
LEFT_OUT = [f"--ignore-glob={ROOT / each}" for each in (*OF_OURS, *THEIR_SERVERS)]
# The plugin's modules import SGLang, and `__main__` runs.
IMPORT_ALL = """
import importlib, pkgutil, sgl_kvfetch
for each in pkgutil.walk_packages(sgl_kvfetch.__path__, "sgl_kvfetch."):
    if not each.name.startswith("sgl_kvfetch.plugin.") and not each.name.endswith(".__main__"):
        importlib.import_module(each.name)
"""


@pytest.fixture(scope="module")
def python() -> Path:
    if torch.accelerator.is_available():
        pytest.skip("SGLang pins a newer torch where there is a GPU")
    try:
        return lowest_python()
    except RuntimeError as error:
        if "NewConnectionError" in str(error):
            pytest.skip("needs a package index")
        raise


def test_nothing_is_declared_that_no_test_has_tried() -> None:
    project = tomllib.loads(PROJECT.read_text())["project"]
    extras = {name: lines for name, lines in project["optional-dependencies"].items() if name != "dev"}
    lines = [*project["dependencies"], *(line for lines in extras.values() for line in lines)]
    names = {Requirement(line).name for line in lines} - {project["name"]}
    assert names <= {each.name for each in declared()} | NOT_HERE.keys()


@pytest.mark.parametrize(
    "arguments",
    [
        ("-c", IMPORT_ALL),
        (*PYTEST, "-m", "not (slow or process or sglang or gpu)", "tests", *LEFT_OUT),
        (*PYTEST, "-m", "not slow and not sglang", *THEIR_SERVERS),
    ],
    ids=["every module is imported", "the fast tests pass", "stores and the server pass"],
)
def test_the_oldest_versions_suffice(python: Path, arguments: tuple[str, ...]) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = (str(python), *arguments)
    done = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
