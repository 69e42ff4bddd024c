"""One word for a reason: code, metrics and docs/operations.md use those of `Reason`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from sgl_kvfetch import errors
from sgl_kvfetch.plane.fetch.fetcher import failure_reason
from sgl_kvfetch.plugin.host.patience import GIVEN_UP
from sgl_kvfetch.reasons import ADVICE, Reason

ROOT = Path(__file__).parents[1]


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
        for word in re.findall(r'\b(?:miss|labels)\("(?:lookup|fetch|load)", "(\w+)"', f.read_text())
    }
    assert len(found) >= 5
    assert found | set(get_args(errors.StoreErrorReason)) | set(GIVEN_UP) <= set(Reason)
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.KVFetchError)]
    assert {failure_reason(kind("io", "") if kind is errors.StoreError else kind()) for kind in kinds} <= set(Reason)
