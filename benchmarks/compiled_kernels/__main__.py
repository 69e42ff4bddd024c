"""Compile the kernels for several GPUs, without having them, and report facts about the machine code.

page    writes docs/gpu/compiled.md
facts   prints every variant, one JSON object per line
floors  prints the table of least times in docs/kernels.md, which needs no compiler
options prints the table of restore_klt's options in docs/gpu/model.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.compiled_kernels.page import floor_lines

PAGE = Path(__file__).parents[2] / "docs" / "gpu" / "compiled.md"


def main(arguments: Sequence[str] | None = None) -> int:
    summary, _, choices = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compiled_kernels",
        description=summary,
        epilog=choices,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", nargs="?", default="page", choices=("page", "facts", "floors", "options"))
    parser.add_argument("--out", type=Path, default=PAGE, metavar="FILE", help="where to write the page")
    parser.add_argument("--targets", nargs="+", metavar="TARGET", help="facts for these GPUs alone, such as sm_90")
    options = parser.parse_args(arguments)
    if options.what == "floors":
        print("\n".join(floor_lines()))
        return 0

    from benchmarks.compiled_kernels import machine_code, page  # they need Triton
    from benchmarks.gpu_model import option_lines
    from sgl_kvfetch.triton_kernels.restore_klt import OPTIONS

    if options.what == "options":
        print("\n".join(option_lines((str(x), machine_code.restore_program(x)) for x in OPTIONS)))
        return 0
    if options.what == "page":
        options.out.write_text(page.page(list(machine_code.compile_all())))
        print("wrote", options.out)
        return 0
    for found in machine_code.compile_all(options.targets or machine_code.TARGETS):
        print(json.dumps(asdict(found)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
