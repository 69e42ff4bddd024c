"""Compares SGLang with the tables of seams and places: ``scripts/sglang_report VERSION``."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

from harness.beside import environment
from harness.sglang_beside import install_sglang_beside
from sgl_kvfetch.plugin.seams import SEAMS, check_name, find, has, installed_seams
from sgl_kvfetch.plugin.versions import table_version
from sglang_on_cpu.seams import SEAMS as CPU_SEAMS
from tests.plugin.sglang_places import PLACES, Place

Row = tuple[str, str, str | None, str]  # kind and path, what it is for, what is wrong or None, signature


def installed_places() -> list[Place]:
    places = [place for place in PLACES if table_version() in place.versions]
    return [place for place in places if place.patch is None or has(place.patch)]


def fault(place: Place) -> str | None:
    """Return what is wrong with one place (what was found and what was expected), or None."""
    if (wrong := check_name(place.path)) is not None:
        return wrong
    target = find(place.path)
    if place.params is not None:
        found = tuple(inspect.signature(target).parameters) if callable(target) else None
        if found != place.params:
            return f"{place.path}: found {found}, expected {place.params}"
    absent = [name for name in place.has if name not in _members(target)]
    absent += [name for name in place.mentions if name not in _mentioned(target)]
    return f"{place.path}: expected {', '.join(absent)}, found none of that name" if absent else None


def _members(target: Any) -> set[str]:
    """Return the attributes and fields of a class. A field without a default is not an attribute."""
    fields = {name for cls in getattr(target, "__mro__", ()) for name in inspect.get_annotations(cls)}
    return fields | set(dir(target))


def _mentioned(target: Any) -> set[str]:
    """Return the names that a function's code uses, with nested functions. Looks behind hooks."""
    function = inspect.unwrap(target)
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    names: set[str] = set()
    while pending:
        code = pending.pop()
        names.update(code.co_names)
        pending.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return names


def read_tables() -> list[Row]:
    seams = [
        (f"seam {seam.path}", seam.hook, check_name(seam.path), _signature(seam.path))
        for seam in installed_seams([*SEAMS, *CPU_SEAMS])
    ]
    places = installed_places()
    return [*seams, *((f"place {place.path}", place.why, fault(place), _signature(place.path)) for place in places)]


def _signature(path: str) -> str:
    try:
        target = find(path)
    except (ImportError, AttributeError):
        return "not there"
    names = ", ".join(inspect.signature(target).parameters) if callable(target) else repr(target)
    return textwrap.shorten(f"({names})", 300)


def read_tables_of(folder: Path | None) -> tuple[str, list[Row]]:
    """Check the release in a folder, or the environment's own. Return its version, too."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.plugin.sglang_report", "--rows"],
        env=None if folder is None else environment(folder),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"SGLang cannot be imported:\n{done.stderr}")
    version, rows = json.loads(done.stdout.splitlines()[-1])
    return version, [tuple(row) for row in rows]


def report(version: str, rows: list[Row], expected_version: str, expected: list[Row]) -> str:
    """Return the counts of what holds, and each row that does not, with both signatures."""
    lines = []
    for kind in ("seam", "place"):
        of_kind = [row for row in rows if row[0].startswith(f"{kind} ")]
        num_broken = sum(row[2] is not None for row in of_kind)
        lines.append(f"{kind}s of sglang {version}: {len(of_kind) - num_broken} as expected, {num_broken} not")
    signatures = {name: signature for name, _, _, signature in expected}
    for name, why, wrong, signature in rows:
        if wrong is not None:
            lines += ["", f"{name}: {why}", f"  {wrong}"]
            lines += [f"  {expected_version}: {signatures.get(name, 'not in its table')}", f"  {version}: {signature}"]
    return "\n".join(lines)


def main() -> int:
    if sys.argv[1:] == ["--rows"]:
        from sglang.version import __version__

        with contextlib.redirect_stdout(sys.stderr):
            rows = read_tables()
        print(json.dumps([__version__, rows]))
        return 0
    parser = argparse.ArgumentParser(prog="scripts/sglang_report", description=__doc__)
    parser.add_argument("version", metavar="VERSION", help="a release of SGLang, such as 0.5.24, installed beside ours")
    try:
        folder = install_sglang_beside(parser.parse_args().version)
    except RuntimeError as error:
        raise SystemExit(str(error)) from error
    version, rows = read_tables_of(folder)
    print(report(version, rows, *read_tables_of(None)))
    return int(any(wrong is not None for _, _, wrong, _ in rows))


if __name__ == "__main__":
    raise SystemExit(main())
