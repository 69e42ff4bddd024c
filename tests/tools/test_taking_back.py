"""docs/operations.md: its commands check a store, and take back a quantiser and a profile."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from harness.store_process import StoreProcess
from tests.shell_blocks import ROOT, blocks_of
from tests.tools.conftest import Stored, kvfetch, kvfetch_json
from tests.tools.test_profiles import put

pytestmark = pytest.mark.process

PAGE = (
    (ROOT / "docs" / "operations.md").read_text().partition("\n## Stopping and moving")[2].partition("\n## Before")[0]
)


def test_the_commands_roll_a_store_back(tmp_path: Path, stored: Stored) -> None:
    """Of two profiles the old one is the newest in the end, and one of two namespaces is gone."""
    old, new = (put(stored.root, tmp_path, number) for number in (1, 2))
    namespaces = [segment.manifest.key.namespace for segment in stored.segments]
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    with StoreProcess(stored.root) as store:
        stands_for = {
            "http://STORE:8700#NAMESPACE": f"{store.url}#{namespaces[-1]}",
            "http://STORE:8700": store.url,
            "OLD": old,
            "old.profile": str(tmp_path / "old.profile"),
            "token": str(token),
        }
        for line in "".join(blocks_of(PAGE)).splitlines():
            program, *words = (stands_for.get(word, word) for word in shlex.split(line))
            result = kvfetch(*words)
            assert (program, result.exit_code) == ("kvfetch", 0), f"{line}\n{result.output}"
        listed = kvfetch_json("profile", "list", store.url)
    assert {row["digest"]: row["is_newest"] for row in listed} == {old: True, new: False}
    assert {path.parent.name for path in stored.root.rglob("*.kvm")} == set(namespaces[:-1])
