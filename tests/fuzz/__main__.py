"""Fuzz what comes from outside, guided by coverage: ``python -m tests.fuzz [TARGET...] [--seconds N]``.

Without targets, all have their turn; ``--seconds`` is for all of them together, by default ten minutes. Each runs in a
process of its own, which may take 1 GiB of memory, and 10 s for one input. It begins with tests/fuzz/corpus/TARGET
and with what a writer makes. An input that fails is written to tests/fuzz/failed-*, and the exit code is 1. Run one
again with ``--input FILE``.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import atheris

FOLDER = Path(__file__).parent
CORPUS = FOLDER / "corpus"
NAMES = ["manifests", "segments", "bitstreams", "http"]
_MAX_INPUT_BYTES = 16384
_MAX_RSS_MB = 1024
_MAX_INPUT_S = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--input", type=Path)
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        return _fuzz(args.targets[0], args.child)
    names = args.targets or NAMES
    failed = []
    for name in names:
        known = CORPUS / name
        with tempfile.TemporaryDirectory(prefix="kvfetch-fuzz-") as found:
            limits = [f"-rss_limit_mb={_MAX_RSS_MB}", f"-timeout={_MAX_INPUT_S}", f"-max_len={_MAX_INPUT_BYTES}"]
            where = [str(args.input.resolve())] if args.input else [found, *([str(known)] if known.is_dir() else [])]
            seconds = max(1, args.seconds // len(names))
            artifacts = f"-artifact_prefix={FOLDER}/failed-{name}-"
            run = [f"-max_total_time={seconds}", "-print_final_stats=1", artifacts, *limits, *where]
            command = [sys.executable, "-m", "tests.fuzz", name, "--child", *run]
            if subprocess.run(command, cwd=FOLDER.parents[1], env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode:
                failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def _fuzz(name: str, arguments: list[str]) -> int:
    """Fuzz one target in this process, which libFuzzer ends."""
    logging.disable()  # a server that logs each bad request is slower than what it is asked
    with atheris.instrument_imports(include=["sgl_kvfetch", "tests.fuzz"]):
        from tests.codec.bitstream.mutations import mutate_body
        from tests.fuzz.targets import TARGETS, seeds_of
    folders = [Path(each) for each in arguments if not each.startswith("-")]
    if folders[0].is_dir():
        for number, seed in enumerate(seeds_of(name)):
            (folders[0] / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return mutate_body(data, rng)[:most] if rng.random() < 0.7 else atheris.Mutate(data, most)

    more = {"custom_mutator": mutate} if name == "manifests" else {}
    atheris.Setup([sys.argv[0], *arguments], TARGETS[name], **more)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
