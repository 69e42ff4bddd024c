"""The tests that a release must pass beside those of each change, in six parts of about the same time.

``scripts/test`` leaves them out, and ``scripts/test --release`` runs them. ``.ci/run`` runs one part after all others,
the next one for each commit, so that none is left out for more than six of them in a row. Where a promise has many
cases (models, modes, cards), each change must pass one, and the others are here.

    python -m tests.tiers [PART]    # prints the files and tests of a part, 1 to 6; by default of all parts
    python -m tests.tiers slow      # prints the files that `scripts/test --fast` leaves out
"""

from __future__ import annotations

import sys

RELEASE: dict[str, tuple[str, ...]] = {
    "other versions": (
        "tests/test_lowest.py",
        "tests/plugin/test_versions.py::test_the_other_release_matches_the_tables",
    ),
    "packaging": (
        "tests/codec/test_aarch64.py",
        "tests/test_deploy.py",
        "tests/test_helm.py",
        "tests/test_store_only.py",
        "tests/test_wheel.py",
    ),
    "families of models": (
        "tests/e2e/drafts.py",
        "tests/e2e/test_families.py",
        "tests/e2e/test_draft_model.py::test_a_draft_model_goes_on_from_what_it_stored[host]",
        "tests/e2e/test_draft_model.py::test_a_draft_model_goes_on_from_what_it_stored[on the GPU path]",
        "tests/codec/calibrate/test_real_model.py",
    ),
    "fuzzers, soaks and benchmarks": (
        "tests/fuzz",
        "tests/benchmarks/test_gpu_bundle.py",
        "tests/benchmarks/test_gpu_check.py",
        "tests/benchmarks/test_gpu_server.py",
        "tests/benchmarks/test_smoke.py",
        "tests/benchmarks/test_soak.py",
        "tests/e2e/test_data_plane.py::test_a_store_that_is_killed_costs_hits_and_no_answer",
    ),
    "all cards and processors": (
        "tests/e2e/test_exact_on_gpu.py",
        "tests/codec/quant/test_klt.py::test_each_instruction_set_rounds_within_the_bounds",
        "tests/triton_kernels/test_emulated_kernels.py",
        "tests/triton_kernels/test_compiled_kernels.py::test_compiles_for_another_card",
        "tests/triton_kernels/test_compiled_kernels.py::test_the_oldest_triton_compiles_every_kernel",
    ),
    "a user's first hour": (
        "tests/server/test_page_in_browser.py",
        "tests/test_examples.py",
        "tests/test_quick_start.py",
    ),
}

# What `scripts/test --fast` leaves out beside tests with a marker (slow, process, sglang, gpu). By folder, the
# files of which each takes more than 2 s of CPU time, or imports as long for tests with such a marker. Of each folder
# other files are left, but for `tests/e2e`.
SLOW = {
    "tests": "blocks",
    "tests/benchmarks": "codec",
    "tests/codec/bitstream": "ans ladder nvdec",
    "tests/codec/calibrate": "addend calibrate layer_map layers packed",
    "tests/codec/container": "bounds encryption segment sides",
    "tests/codec/quant": "klt",
    "tests/directory": "catalog disk_room dropped_levels",
    "tests/plane/fetch": "ahead levels",
    "tests/plane": "audit",
    "tests/plugin/device": "choices ends linker",
    "tests/plugin/host": "side_pools storage storage_nvdec",
    "tests/server": "schema",
    "tests/stores": "connection_states transfers",
    "tests/tools": "calibrate doctor inspect transcode verify why",
}


def slow_files() -> list[str]:
    slow = [f"{folder}/test_{name}.py" for folder, names in SLOW.items() for name in names.split()]
    return ["tests/e2e", *slow]


def files(part: int | None = None) -> list[str]:
    """Return what pytest is to run: of a part, 1 to 6, or of all."""
    parts = list(RELEASE.values())
    return [path for paths in (parts if part is None else [parts[part - 1]]) for path in paths]


if __name__ == "__main__":
    print(*(slow_files() if sys.argv[1:] == ["slow"] else files(*map(int, sys.argv[1:]))), sep="\n")
