"""The table of crossings is whole, and docs/tests.md has it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sgl_kvfetch.protocol.config import KVFetchConfig
from tests.crossings import ELSEWHERE, FEATURES, KEYS, OTHER_KEYS, REFUSED, table

ROOT = Path(__file__).parents[1]


def test_each_config_key_belongs_to_a_feature_or_to_none() -> None:
    assert sorted([*KEYS, *OTHER_KEYS]) == sorted(KVFetchConfig.model_fields)
    assert {*KEYS.values()} <= {*FEATURES}


@pytest.mark.parametrize("test", [*ELSEWHERE.values(), *(test for test, _ in REFUSED.values())])
def test_a_pair_that_is_tested_elsewhere_names_a_test(test: str) -> None:
    path, name = test.partition("[")[0].split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_docs_have_the_table() -> None:
    """`python -m tests.crossings` prints it."""
    assert f"\n{table()}" in (ROOT / "docs" / "tests.md").read_text()
