"""Processes that find SGLang imported are like others: command line, folder, environment, output, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.imported_sglang import ImportedSGLang, common_environment

SCRIPT = """
import os, sys
assert "sglang.srt.managers.scheduler" in sys.modules
print(sys.argv, os.getcwd(), os.environ["XDG_CACHE_HOME"], os.getsid(0) == os.getpid())
print("wrong", file=sys.stderr)
"""


@pytest.mark.sglang
@pytest.mark.slow
def test_they_are_like_others(imported_sglang: ImportedSGLang | None, tmp_path: Path) -> None:
    if imported_sglang is None:
        pytest.skip("with an accelerator, each process imports SGLang itself")
    done = imported_sglang.run(["-c", SCRIPT, "--flag", "a b"], tmp_path, XDG_CACHE_HOME="cache")
    assert (done.returncode, done.stderr) == (0, "wrong\n")
    assert done.stdout == f"['-c', '--flag', 'a b'] {tmp_path} cache True\n"
    ends = {"sys.exit(3)": 3, "raise ValueError": 1, "os.kill(os.getpid(), 9)": -9}
    assert {how: imported_sglang.run(["-c", f"import os, sys; {how}"], tmp_path).returncode for how in ends} == ends


def test_what_is_read_while_sglang_is_imported_needs_an_import_of_its_own(tmp_path: Path) -> None:
    with ImportedSGLang() as imported, (tmp_path / "log").open("wb") as log:
        environment = common_environment(), {"KVFETCH_CPU_ENGINE": "other"}
        assert imported.start(["-c", ""], tmp_path, *environment, log, log) is None


def test_an_import_that_fails_says_why(tmp_path: Path) -> None:
    environment = {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "sglang.py").write_text("raise ImportError('of all things')")
    with (
        ImportedSGLang() as imported,
        (tmp_path / "log").open("wb") as log,
        pytest.raises(RuntimeError, match="of all"),
    ):
        imported.start(["-c", ""], tmp_path, environment, {}, log, log)
