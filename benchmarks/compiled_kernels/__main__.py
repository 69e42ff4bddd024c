"""Compile the kernels for several GPUs, without having them, and print facts about the machine code.

One JSON object a line, for each kernel's form and each GPU: registers of a thread, shared memory of a program, spilled
bytes, widest accesses, matrix instructions.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from benchmarks.compiled_kernels import machine_code


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled_kernels", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=machine_code.TARGETS, metavar="TARGET", help="such as sm_90")
    for found in machine_code.compile_all(parser.parse_args().targets):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()
