from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a benchmark's ``main`` in this process. Returns what it wrote to ``--json``."""

    def run(main: Callable[[], object], *args: object) -> dict[str, Any]:
        out = tmp_path / "out.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, args), "--json", str(out)])
        assert main() in (0, None)
        content: dict[str, Any] = json.loads(out.read_text())
        return content

    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """A text of words that the tiny model's tokenizer knows."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{3 + i * i % 250}" for i in range(4000)))
    return path
