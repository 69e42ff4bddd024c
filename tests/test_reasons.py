"""One word for a reason: code, metrics and docs/operations.md use those of `Reason`, and each has a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from sgl_kvfetch import errors
from sgl_kvfetch.plugin.host.storage import GIVEN_UP
from sgl_kvfetch.reasons import ADVICE, Reason, reason_of
from tests import reasons

ROOT = Path(__file__).parents[1]

# Only a fake makes these: two need a GPU, and one a bug. For the others, `kvfetch why` is asked about a real store or
# server.
MADE_UP = {Reason.NO_SLOTS, Reason.FAILED, Reason.INTERNAL}


def test_the_docs_explain_every_reason() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    tables = re.findall(r"^\| reason \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    explained = {word for row in rows for word in re.findall(r"`(\w+)`", re.sub(", with .*", "", row.split("|")[1]))}
    assert explained == set(Reason) == set(ADVICE)


def test_misses_are_counted_by_reason() -> None:
    files = (ROOT / "sgl_kvfetch").rglob("*.py")
    found = {
        word
        for f in files
        for word in re.findall(r'\b(?:miss|labels)\("(?:lookup|fetch|load|write)", "(\w+)"', f.read_text())
    }
    assert len(found) >= 5
    assert found | set(get_args(errors.StoreErrorReason)) | set(GIVEN_UP) <= set(Reason)
    assert {Reason(reason) for reason in get_args(errors.StoreErrorReason)} == {
        reason_of(errors.StoreError(reason, "")) for reason in get_args(errors.StoreErrorReason)
    }


def reasons_checked_by(name: str) -> set[Reason]:
    """The reasons that tests name which call this function of `tests.reasons`."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if name not in text:
            continue
        for test in ast.parse(text).body:
            source = ast.unparse(test)
            if isinstance(test, ast.FunctionDef | ast.AsyncFunctionDef) and f"{name}(" in source:
                found |= {Reason[each] for each in re.findall(r"\bReason\.([A-Z_]+)\b", source)}
    return found


def test_each_reason_is_produced_by_a_test() -> None:
    told = reasons_checked_by(reasons.assert_why.__name__)
    counted = reasons_checked_by(reasons.assert_counted.__name__)
    assert set(Reason) - told == MADE_UP
    assert counted >= MADE_UP
