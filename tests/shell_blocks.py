"""Runs the blocks of commands that documents have, as somebody would type them into a shell."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks_of(text: str) -> list[str]:
    """Return the blocks of commands of a page, or of a part of it."""
    return _BLOCK.findall(text)


def replaced(script: str, replacements: Iterable[tuple[str, str]]) -> str:
    """Replace texts that stand in the script once each. Whatever a test replaces, it does not show."""
    for old, new in replacements:
        assert script.count(old) == 1, old
        script = script.replace(old, new)
    return script


def installing(target: str) -> str:
    """Return the beginning of a command like ``pip install``, into the folder ``target`` and without what it needs.

    The tests' own environment has the rest: SGLang would take gigabytes.
    """
    return f"{sys.executable} -m pip install --quiet --no-deps --no-build-isolation --target {target} "


@dataclass(frozen=True)
class Shell:
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    def tail(self) -> str:
        """Return the ends of both outputs."""
        return self.stdout.read_text()[-5000:] + self.stderr.read_text()[-5000:]


@contextmanager
def running(script: str, folder: Path, name: str, installed: Path) -> Iterator[Shell]:
    """Run a script by bash in ``folder``. In the end, kill it and all that it started.

    ``installed``: what `installing` filled. ``name``: of the output's files, in ``folder``.
    """
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["PYTHONPATH"] = str(installed)
    out, err = folder / f"{name}.out", folder / f"{name}.err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            yield Shell(process, out, err)
        finally:
            with contextlib.suppress(ProcessLookupError):  # all have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
