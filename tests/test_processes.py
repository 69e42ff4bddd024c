"""How much memory a process may take, as Linux tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvfetch.processes import available_bytes, own_bytes


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 8000 * 1024), (str(1 << 40), 8000 * 1024), ("5000000", 5000000 - 4000000 + 300000)]
)
def test_memory_is_limited_by_the_machine_and_by_the_container(tmp_path: Path, limit: str, expected: int) -> None:
    group = tmp_path / "sys/fs/cgroup/pod"
    for folder in (group, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\nHugePages_Free: 0\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/pod\n")
    assert available_bytes(tmp_path) == 8000 * 1024  # no limits here
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text("4000000\n")
    (group / "memory.stat").write_text("anon 3700000\ninactive_file 300000\n")
    assert available_bytes(tmp_path) == expected


def test_what_this_process_has_taken() -> None:
    before = own_bytes()
    taken = bytearray(b"x") * (64 << 20)
    assert own_bytes() >= before + 0.9 * len(taken)
    assert available_bytes() > 1 << 20
