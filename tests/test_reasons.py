"""One word for a reason: code, metrics and docs/operations.md use those of `Reason`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from sgl_kvfetch import errors
from sgl_kvfetch.plugin.host.storage import GIVEN_UP
from sgl_kvfetch.reasons import ADVICE, Reason, reason_of

ROOT = Path(__file__).parents[1]


def test_the_docs_explain_every_reason() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    tables = re.findall(r"^\| reason \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    explained = {word for row in rows for word in re.findall(r"`(\w+)`", re.sub(", with .*", "", row.split("|")[1]))}
    assert explained == set(Reason) == set(ADVICE)


def test_misses_are_counted_by_reason() -> None:
    counted = re.compile(r'\b(?:miss|labels)\("(?:lookup|fetch|load|write)", "(\w+)"')
    found = {word for file in (ROOT / "sgl_kvfetch").rglob("*.py") for word in counted.findall(file.read_text())}
    assert len(found) >= 5
    of_stores = set(get_args(errors.StoreErrorReason))
    assert found | of_stores | set(GIVEN_UP) <= set(Reason)
    assert {reason_of(errors.StoreError(reason, "")) for reason in of_stores} == of_stores
