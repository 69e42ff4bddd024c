"""Compares SGLang's `torch_native` attention of a prompt with ours (`sgl_kvfetch/plugin/cpu/attention.py`): whether the
bits are equal, for each form, and the CPU time a layer behind prefixes of several lengths.

    python -m benchmarks.attention [--new N] [--prefixes N,N,...]

Heads are those of SmolLM2-135M. Times are of one thread, the median of a few.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rich.console import Console

from benchmarks.report import make_parser, make_table, whole_number, whole_numbers
from harness.attention_forms import FORMS, AttentionForm, sglang_attention
from sgl_kvfetch.plugin.cpu.attention import attend_to_prefix

DTYPES = (torch.bfloat16, torch.float32)


def main(args: list[str] | None = None) -> int:
    parser = make_parser("benchmarks.attention", __doc__)
    parser.add_argument("--new", type=whole_number, default=16, help="new tokens")
    parser.add_argument("--prefixes", type=whole_numbers, default=[240, 1008, 4080, 8176], help="tokens before them")
    options = parser.parse_args(args)
    console = Console()
    sglang, ours = sglang_attention(), partial(attend_to_prefix, None)
    rows = []
    for form in FORMS:
        equal = [torch.equal(ours(**form.arguments(dtype)), sglang(**form.arguments(dtype))) for dtype in DTYPES]
        rows.append([form.name, *("equal" if is_equal else "differ" for is_equal in equal)])
    console.print(make_table("bits", ["form", *(str(dtype).removeprefix("torch.") for dtype in DTYPES)], rows))
    torch.set_num_threads(1)
    rows = []
    for num_before in options.prefixes:
        form = AttentionForm("", 9, 3, 64, 64, ((num_before, options.new),))
        before, after = (_cpu_ms(attend, form.arguments(torch.bfloat16)) for attend in (sglang, ours))
        rows.append([str(num_before), f"{before:.2f}", f"{after:.2f}"])
    console.print(make_table(f"CPU ms a layer, {options.new} new tokens", ["tokens before", "SGLang", "ours"], rows))
    return 0


def _cpu_ms(attend: Callable[..., object], arguments: dict[str, Any], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.process_time()
        attend(**arguments)
        times.append(1e3 * (time.process_time() - start))
    return statistics.median(times[1:])


if __name__ == "__main__":
    raise SystemExit(main())
