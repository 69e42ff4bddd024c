"""The path of a page through the package: in which modules a function runs, as docs/architecture.md draws it."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[2]
MOST_MODULES = 47
# These run now and then: where a machine is slow, a read is silent for long, or a timer of a write before is late.
SOMETIMES = ("plane/store", "plane/write/")
_MODULE = re.compile(rf"{re.escape(str(ROOT))}/(?:sgl_kvfetch/|(?=triton_kernels/))(.+)\.py")


@contextmanager
def modules_run() -> Iterator[set[str]]:
    """Collect the package's modules in which a function runs, on this thread and those that start meanwhile."""
    seen: set[str] = set()

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and (module := _MODULE.fullmatch(code.co_filename)):
            seen.add(module[1])

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def require_drawn(way: str, seen: Collection[str], sometimes: tuple[str, ...] = SOMETIMES) -> None:
    """Raise AssertionError unless these are the modules that are drawn for a way, and few. Those that begin as one of
    ``sometimes`` are left out."""
    found: dict[str, list[str]] = {}
    for module in sorted(each for each in seen if not each.startswith(sometimes)):
        house, _, name = module.partition("/") if "/" in module else ("root", "", module)
        found.setdefault(house, []).append(name)
    rows = {house: ", ".join(names) for house, names in found.items()}
    assert rows == _drawn(way), "\n".join(
        [*(f"| {house} | {names} |" for house, names in rows.items()), f"{len(seen)}"]
    )
    assert len(seen) <= MOST_MODULES


def _drawn(way: str) -> dict[str, str]:
    """Return what docs/architecture.md says: by house, the modules of a way."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## The path of a page\n")[2]
    head, *rows = re.findall(r"^\| (.+) \|$", text.partition("\n## ")[0], re.MULTILINE)
    column = head.split(" | ").index(way)
    cells = {row.split(" | ")[0].strip("`/"): row.split(" | ")[column] for row in rows}
    return {house: names for house, names in cells.items() if names.strip()}
