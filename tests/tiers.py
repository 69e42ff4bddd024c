"""The tests that a release must pass beside those of each change, in six parts of about the same time.

``scripts/test`` leaves them out, and ``scripts/test --release`` runs them. ``.ci/run`` runs one part after all others,
the next one for each commit, so that none is left out for more than six of them in a row.

    python -m tests.tiers [PART]    # prints the files of a part, 1 to 6; by default of all parts
"""

from __future__ import annotations

import sys

RELEASE: dict[str, tuple[str, ...]] = {
    "the lowest versions": ("tests/test_lowest.py",),
    "packaging": (
        "tests/codec/test_aarch64.py",
        "tests/test_compose.py",
        "tests/test_containers.py",
        "tests/test_dashboard.py",
        "tests/test_helm.py",
        "tests/test_store_only.py",
        "tests/test_systemd_unit.py",
        "tests/test_wheel.py",
    ),
    "families of models": (
        "tests/e2e/families.py",
        "tests/e2e/drafts.py",
        "tests/e2e/test_families.py",
        "tests/e2e/test_states.py",
    ),
    "fuzzers and soaks": (
        "tests/fuzz",
        "tests/benchmarks/test_smoke.py",
        "tests/benchmarks/test_smoke_sglang.py",
        "tests/benchmarks/test_soak.py",
        "tests/e2e/test_encode_kill.py",
    ),
    "kernels on all cards": ("tests/triton_kernels/test_emulated_kernels.py",),
    "a user's first hour": (
        "tests/server/test_page_in_browser.py",
        "tests/test_examples.py",
        "tests/test_quick_start.py",
    ),
}


def files(part: int | None = None) -> list[str]:
    """Return what pytest is to run: of a part, 1 to 6, or of all."""
    parts = list(RELEASE.values())
    return [path for paths in (parts if part is None else [parts[part - 1]]) for path in paths]


if __name__ == "__main__":
    print(*files(*map(int, sys.argv[1:])), sep="\n")
