"""The native code on aarch64, which an emulator runs: its results are those of this machine, to the bit."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from sgl_kvfetch.codec.bitstream.ans import AnsCodec, static_tables
from tests.codec.bitstream.test_ans import coefficients

CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SOURCE = Path(__file__).with_name("native.cpp")
SETUP = Path(__file__).parents[2] / "setup.py"
MISSING = [name for name in ("g++", CROSS_COMPILER, EMULATOR) if shutil.which(name) is None]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        bool(MISSING), reason=f"needs {', '.join(MISSING)}: apt-get install g++-aarch64-linux-gnu qemu-user"
    ),
]

Run = Callable[[Sequence[int], Sequence[np.ndarray | bytes]], bytes]


def run_on_both(module: str, folder: Path) -> Run:
    """Compile a module for both machines, as setup.py does. Return what runs it on both, and compares the results."""
    flags = re.findall(r'"(-[^"]+)"', SETUP.read_text())
    assert "-ffp-contract=off" in flags
    include = sysconfig.get_paths()["include"]
    # Python's functions are not called, and there is no Python of the other machine.
    whole = ["-static", "-Wl,--unresolved-symbols=ignore-all", f"-D{module}", f"-I{include}"]
    programs = []
    for compiler in ("g++", CROSS_COMPILER):
        program = folder / compiler
        subprocess.run([compiler, *flags, *whole, str(SOURCE), "-o", str(program)], check=True)
        programs.append([str(program)] if compiler == "g++" else [EMULATOR, str(program)])

    def run(sizes: Sequence[int], arrays: Sequence[np.ndarray | bytes]) -> bytes:
        given = b"".join(array if isinstance(array, bytes) else array.tobytes() for array in arrays)
        here, there = (
            subprocess.run([*program, *map(str, sizes)], input=given, capture_output=True, check=True).stdout
            for program in programs
        )
        assert here == there
        return here

    return run


def test_the_coder_writes_and_reads_the_same_bitstreams(tmp_path: Path) -> None:
    run = run_on_both("CODER", tmp_path)
    for num_rows, num_tokens in (1, 5), (40, 33), (300, 1024):
        frames = coefficients(num_rows, num_tokens)
        rows = frames.reshape(-1, num_tokens).numpy()
        tables = static_tables()[:4]  # without those of digits
        found = run([*rows.shape, 48], [*(t for t in tables if isinstance(t, bytes)), rows])
        assert found == rows.tobytes() + AnsCodec().encode(frames)


def test_values_are_restored_and_quantised_alike(tmp_path: Path) -> None:
    run = run_on_both("QUANTISER", tmp_path)
    random = np.random.default_rng(0)
    tokens, heads, dim, kept, wide = 65, 3, 32, 150, 20
    channels, pairs = 2 * heads * dim, 12
    for product_type, type_, is_interleaved in (0, 0, 0), (0, 1, 1), (1, 1, 0), (0, 2, 0):
        product = random.normal(0, np.geomspace(30, 0.1, channels), (tokens, channels)).astype(np.float32)
        product[:, kept + 1 :] *= 40  # sums of coefficients that are not kept: some are large enough for doubts
        halves = (product.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
        angles = random.uniform(0, 7, (tokens, pairs))
        arrays = (
            halves if product_type else product,
            np.exp2(random.integers(-4, 4, tokens) / 2),
            random.normal(0, 1, channels),
            np.concatenate((np.cos(angles), np.sin(angles)), axis=1),
            1 / np.geomspace(30, 0.1, channels),
            random.normal(0, 0.1, channels + 2 * heads + 1),
            np.where(np.arange(kept) < wide, 1000, 127),
        )
        floats = [a if a.dtype == np.uint16 else a.astype(np.float32) for a in arrays]
        wide_rows = np.arange(wide, dtype=np.int64), np.full(wide, 4, dtype=np.int64)
        sizes = tokens, heads, pairs, is_interleaved, product_type, type_, kept, wide
        found = np.frombuffer(run(sizes, [*floats, *wide_rows]), np.uint8)
        doubtful, exponents, integers = np.split(found[-tokens * (2 + kept + wide) :], [tokens, 2 * tokens])
        assert exponents[0] == 0  # a sink
        assert 0 < doubtful.sum() < tokens
        assert len(np.unique(exponents)) > 2
        assert len(np.unique(integers)) > 100
