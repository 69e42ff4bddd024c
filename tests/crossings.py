"""Which features work together: each pair of them, in host mode and in device mode on a stand-in GPU.

Each pair runs a short sequence in `tests/plugin/host/test_crossings.py` or `tests/plugin/device/test_crossings.py`:
a prompt is stored, what the pair is about happens, and the prompt is fetched twice. All values are compared, and so is
the memory that nobody should have written to. A pair that has such a test already names it in `ELSEWHERE`. A pair that
the package refuses names the message in `REFUSED`, and the test that meets it.

**A new feature** needs its row here, and what it does in both sequences. A new config key fails `test_docs.py`
until `KEYS` says which feature it belongs to, or `OTHER_KEYS` that it belongs to none.

    python -m tests.crossings    # prints the table for docs/tests.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from typing import NamedTuple, Protocol

from harness.metrics import own_metric

FEATURES = (
    "TP 2",
    "audits",
    "levels",
    "encryption",
    "side pages",
    "LoRA",
    "draft model",
    "`memory_cache`",
    "restart of the data plane",
    "abort",
    "weight update",
)
MODES = ("host", "device")

# The feature that each config key belongs to, and those that change where, when or how fast things are done.
KEYS = {
    "audit_share": "audits",
    "levels": "levels",
    "key_file": "encryption",
    "memory_cache": "`memory_cache`",
    "max_tp_size": "TP 2",
    "model_id": "weight update",
}
OTHER_KEYS = {
    *("store", "s3", "index", "tls", "token_file", "mode", "quantiser", "profile", "target_kl", "codec", "recompute"),
    *("lookup_timeout_s", "fetch_timeout_s", "max_connections", "ttl_s", "write_queue_bytes"),
    *("device", "codec_threads"),
}


class Pair(NamedTuple):
    """Two features, in the order of `FEATURES`."""

    first: str
    second: str

    def __str__(self) -> str:
        return " and ".join(name.strip("`") for name in self)


PAIRS = [Pair(*names) for names in combinations(FEATURES, 2)]

_AGREED = "tests/plugin/device/test_agreed.py::test_ranks_load_what_all_have_into_its_slots_alone"
_IN_MEMORY = "tests/plugin/device/test_loads_from_memory.py::"
ELSEWHERE = {
    (Pair("TP 2", "levels"), "device"): f"{_AGREED}[klt]",
    (Pair("TP 2", "side pages"), "device"): f"{_AGREED}[windows]",
    (Pair("TP 2", "draft model"), "device"): f"{_AGREED}[exact]",
    (Pair("encryption", "`memory_cache`"), "device"): (
        f"{_IN_MEMORY}test_what_is_encrypted_stays_so_and_is_decrypted_each_time"
    ),
}
REFUSED: dict[tuple[Pair, str], tuple[str, str]] = {}  # the test, and the message


def is_cut(pair: Pair) -> bool:
    """Return whether audits take the end of a hit. They do not where it needs side pages (docs/audits.md)."""
    return "audits" in pair and "side pages" not in pair


def to_run(mode: str) -> list[Pair]:
    """Return the pairs whose sequence runs in this mode."""
    return [pair for pair in PAIRS if (pair, mode) not in ELSEWHERE and (pair, mode) not in REFUSED]


class Rank(Protocol):
    """A sequence of a pair, on one rank: what may happen between storing and fetching."""

    def abort(self) -> None: ...

    def restart(self) -> None: ...

    def update(self) -> None: ...


def let_happen(pair: Pair, rank: Rank) -> None:
    """Let happen what the pair is about, if it is something that happens once."""
    for happening in pair:
        match happening:
            case "abort":
                rank.abort()
            case "restart of the data plane":
                rank.restart()
            case "weight update":
                rank.update()


@contextmanager
def assert_memory_is_read(pair: Pair) -> Iterator[None]:
    """Check that fetches read `memory_cache`, if the pair has it."""
    read = own_metric("sgl_kvfetch_memory_cache_read_bytes_total")
    yield
    if "`memory_cache`" in pair:
        assert own_metric("sgl_kvfetch_memory_cache_read_bytes_total") > read


def table() -> str:
    """Return the table in Markdown: in which modes each pair works."""
    lines = ["| | " + " | ".join(FEATURES[1:]) + " |", "|---" * len(FEATURES) + "|"]
    for row, first in enumerate(FEATURES[:-1]):
        cells = [""] * row + [_cell(Pair(first, second)) for second in FEATURES[row + 1 :]]
        lines.append(f"| {first} | " + " | ".join(cells) + " |")
    for (pair, mode), (_, message) in REFUSED.items():
        lines.append(f"\n{pair}, {mode} mode: {message}")
    return "\n".join(lines) + "\n"


def _cell(pair: Pair) -> str:
    allowed = [mode for mode in MODES if (pair, mode) not in REFUSED]
    return "both" if len(allowed) == 2 else " ".join(allowed) or "refused"


if __name__ == "__main__":
    print(table(), end="")
