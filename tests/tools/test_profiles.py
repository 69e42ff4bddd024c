"""``kvfetch profile``, and what other commands say of a store's profiles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane.audit import AuditRecord, keep_record, record_file
from sgl_kvfetch.plane.comparison import Compared
from sgl_kvfetch.tools.doctor import check_audits
from tests.segments import make_heads
from tests.stores.test_profiles import WEIGHTS, save
from tests.tools.conftest import KEYS, Stored, kvfetch_json, said


def put(root: Path, folder: Path, number: int, *args: str) -> str:
    """Publish a profile as if so many seconds after the year 2001. Return its digest."""
    (row,) = kvfetch_json("profile", "put", str(root), str(save(folder, number)), *args)
    digest = str(row["digest"])
    os.utime(root / ".profiles" / WEIGHTS / digest, (1e9 + number, 1e9 + number))
    return digest


def test_publish_list_get_and_withdraw(tmp_path: Path, stored: Stored) -> None:
    root = stored.root
    assert said("profile", "list", str(root)) == "no profiles\n"
    assert kvfetch_json("inspect", str(root))["profiles"] == []
    old, new = (put(root, tmp_path, number) for number in (1, 2))
    rows = kvfetch_json("profile", "list", str(root))
    assert [(row["digest"], row["is_newest"], row["problem"]) for row in rows] == [(new, True, ""), (old, False, "")]
    assert "newest: new servers take it" in said("profile", "list", str(root))
    assert [row["digest"] for row in kvfetch_json("inspect", str(root))["profiles"]] == [new, old]
    assert new in said("inspect", str(root))

    shown = kvfetch_json("profile", "show", str(root), old[:6])
    assert (shown["digest"], [kind["name"] for kind in shown["kinds"]]) == (old, ["chats", "tables"])

    said("profile", "get", str(root), old[:6], "--out", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == save(tmp_path, 1).read_bytes()
    said("profile", "put", str(root), str(tmp_path / "out"))  # as of now: docs/operations.md rolls a store back so
    assert [row["digest"] for row in kvfetch_json("profile", "list", str(root))] == [old, new]
    said("profile", "rm", str(root), old)
    assert old == put(root, tmp_path, 1)
    assert f"withdrawn: {WEIGHTS}/{new}; new servers take {old}" in said("profile", "rm", str(root), new)
    assert "starts with ''" in said("profile", "rm", str(root), "", exit_code=2)  # though there is one alone
    assert "there is no other" in said("profile", "rm", str(root), old)
    assert "starts with '0', found none" in said("profile", "rm", str(root), "0", exit_code=2)


@pytest.mark.parametrize(
    ("typical", "why_off", "status", "says"),
    [
        (0.8, "", "yes", "errors are 0.8 times as large as expected"),
        (1.8, "", "warn", "errors are 1.8 times as large as expected"),
        (1.8, "errors are 9 times as large", "warn", "is not used here: errors are 9 times as large"),
    ],
)
def test_doctor_says_whether_a_profile_fits_the_prompts_and_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typical: float, why_off: str, status: str, says: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for first_head, of_rank in ((0, typical), (2, 0.5)):  # a line for both ranks
        heads = HeadSlice(make_heads().namespace, range(first_head, first_head + 2))
        is_off = why_off if first_head == 0 else ""
        record = AuditRecord("http://store", "m", "klt 1e-3", "klt(profile=1;step=2.0)", why_off=is_off, off_at_s=1e9)
        for i in range(25):
            record = record.and_also(Compared(2 * of_rank, "all layers", of_rank), 600 * i)
        keep_record(record_file("http://store", heads), lambda kept, record=record: record)  # type: ignore[misc]
    assert [each.found for each in check_audits("http://another")] == ["no server of this machine has audited it yet"]
    (row,) = check_audits("http://store/")
    assert row.status == status
    assert row.found.startswith("m, klt 1e-3, in http://store")
    assert says in row.found
    assert (status == "warn") == bool(row.advice)


def test_keys(tmp_path: Path, stored: Stored, key_file: Path) -> None:
    root, keys = stored.root, ("--key-file", str(key_file))
    digest = put(root, tmp_path, 1, *keys)
    assert save(tmp_path, 1).read_bytes() not in (root / ".profiles" / WEIGHTS / digest).read_bytes()
    plain = put(root, tmp_path, 2)
    rows = kvfetch_json("profile", "list", str(root), *keys)
    assert [(row["digest"], row["is_newest"]) for row in rows] == [(plain, False), (digest, True)]
    assert "is not encrypted" in rows[0]["problem"]
    get = ("profile", "get", str(root), digest, "--out", str(tmp_path / "out"))
    said(*get, *keys)
    assert f"encrypted with the key {KEYS.ids[0]}" in said(*get, exit_code=2)


def test_verify_reads_profiles(tmp_path: Path, stored: Stored) -> None:
    digest = put(stored.root, tmp_path, 1)
    assert kvfetch_json("verify", str(stored.root))["profiles"] == {}
    path = stored.root / ".profiles" / WEIGHTS / digest
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert "SHA-256" in kvfetch_json("verify", str(stored.root), exit_code=1)["profiles"][f"{WEIGHTS}/{digest}"]
    output = said("verify", str(stored.root), exit_code=1)
    assert f"kvfetch profile rm {stored.root} {digest}" in output
    assert ": 1 objects corrupt or missing" in output
