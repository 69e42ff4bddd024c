"""How the kernels are best cut into programs on this GPU: all candidates, measured, as a new table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from benchmarks.gpu_check.kernels import POISON, TunedCase, cases, difference
from benchmarks.gpu_check.record import Record
from benchmarks.gpu_check.timing import seconds_of
from benchmarks.kernel_bytes import Span
from sgl_kvfetch.triton_kernels.tuning import Entry, Key, Tuning, candidates, default, read_table, table_text

TABLE = "tuning.json"
_TOKENS = 8192  # of the largest segment, and more than a cache holds
TUNED = tuple(
    (Span(_TOKENS, heads, dim), dtype)
    for dtype in (torch.bfloat16, torch.uint8)  # fp8's bytes
    for heads, dim in ((8, 128), (1, 576))
)
_LEAST_GAIN = 0.03  # less is noise, and leaves the default


def run(record: Record) -> None:
    device = torch.device("cuda")
    tune(record, device, torch.cuda.get_device_name(device), TUNED)


def tune(record: Record, device: torch.device, gpu: str, spans: Sequence[tuple[Span, torch.dtype]]) -> None:
    """Records every time, and the shipped table with what was found here in the place of what it says of it."""
    table = read_table()
    measured: set[Key] = set()
    for span, dtype in spans:
        for case in cases(span, device, dtype):
            if case.key in measured:  # K and V are cut alike
                continue
            measured.add(case.key)
            times_s = _times(record, case, span, device)
            table.pop(case.key, None)
            entry = _better(case.key, times_s, gpu)
            if entry is not None:
                table[case.key] = entry
            record.file(TABLE, table_text(table.values()))


def _times(record: Record, case: TunedCase, span: Span, device: torch.device) -> dict[Tuning, float]:
    """By choice, of those that give the default's bits."""
    usual = default(case.key.operation, case.key.head_dim)
    written = case.launch(usual)
    expected = [x.clone() for x in written]
    times_s = {}
    for tuning in candidates(case.key.operation, case.key.target, case.key.head_dim):
        for x in written:
            x.view(torch.uint8).fill_(POISON)
        found = difference(case.launch(tuning), expected, is_exact=True)
        if found:
            record.fail(f"{case.name}, {span}, {tuning}: {found}")
            continue
        times_s[tuning] = seconds_of(lambda tuning=tuning: case.launch(tuning), device)  # type: ignore[misc]
        record.row(
            "Kernels: cut into programs",
            kernel=case.name,
            at=str(span),
            dtype=case.key.dtype,
            block=tuning.block,
            warps=tuning.warps,
            us=1e6 * times_s[tuning],
            default=tuning == usual,
        )
    return times_s


def _better(key: Key, times_s: dict[Tuning, float], gpu: str) -> Entry | None:
    """The fastest, if it is worth an entry."""
    usual = default(key.operation, key.head_dim)
    if usual not in times_s:
        return None
    best = min(times_s, key=lambda tuning: times_s[tuning])
    if times_s[best] > (1 - _LEAST_GAIN) * times_s[usual]:
        return None
    return Entry(
        key.operation,
        key.target,
        key.dtype,
        key.head_dim,
        best.block,
        best.warps,
        f"measured on {gpu}, {datetime.now(UTC):%Y-%m-%d}, {_TOKENS} tokens: {1e6 * times_s[best]:.1f} us, "
        f"by default {1e6 * times_s[usual]:.1f}",
    )
