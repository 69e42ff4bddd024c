"""Records the machine, its GPU and the software versions."""

from __future__ import annotations

import subprocess

import torch

from benchmarks.gpu_check.record import Record, SkippedError
from benchmarks.machine import machine, versions

_QUERY = "driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"


def run(record: Record) -> None:
    """Record the facts. The step is skipped if torch can use no CUDA GPU."""
    facts = {**machine(), **versions()}
    gpu = facts.pop("gpu")
    if gpu is not None:
        record.row("Machine", what="gpu", **{"is": gpu})
        record.row(
            "Machine", what="compute capability", **{"is": ".".join(map(str, torch.cuda.get_device_capability()))}
        )
        for what, found in _driver_facts().items():
            record.row("Machine", what=what, **{"is": found})
    record.row("Machine", what="CUDA of torch", **{"is": torch.version.cuda})
    for what, found in facts.items():
        record.row("Machine", what=what, **{"is": found})
    if gpu is None:
        raise SkippedError(f"torch {torch.__version__} finds no usable CUDA GPU")


def _driver_facts() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        return {"nvidia-smi": f"{type(e).__name__}"}
    return dict(zip(_QUERY.split(","), (part.strip() for part in done.stdout.split(",")), strict=False))
