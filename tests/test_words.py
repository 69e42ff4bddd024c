"""One word for one thing: docs/glossary.md has the words, and the code uses them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
_FILES = [*(ROOT / "sgl_kvfetch").rglob("*.py"), *(ROOT / "triton_kernels").glob("*.py")]


def test_no_two_classes_have_one_name() -> None:
    places = defaultdict(list)
    for file in _FILES:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(file.relative_to(ROOT)))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


def test_the_code_uses_the_glossarys_words() -> None:
    files = [*_FILES, *(ROOT / "benchmarks").rglob("*.py")]
    code = "\n".join(file.read_text() for file in files).lower().replace("_", " ")
    rows = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    words = {word.strip().lower() for row in rows if row != "word" for word in row.split(",")}
    assert len(words) >= 40
    assert {word for word in words if not re.search(rf"\b{re.escape(word)}", code)} == set()
