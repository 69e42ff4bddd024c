"""Runs one step in this process: ``python -m benchmarks.gpu_check.step MODULE:FUNCTION RESULT SECONDS``."""

from __future__ import annotations

import importlib
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.gpu_check.record import Record, SkippedError

_OURS = ("benchmarks", "sgl_kvfetch", "tests")


def main(runs: str, path: Path, limit_s: float) -> None:
    # Exit normally on SIGTERM, so that servers which the step started are stopped as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("time is over"))
    record = Record(path, limit_s)
    module, _, function = runs.partition(":")
    try:
        getattr(importlib.import_module(module), function)(record)
    except SkippedError as e:
        record.end("skipped", str(e))
    except ModuleNotFoundError as e:
        if e.name is None or e.name.partition(".")[0] in _OURS:
            raise
        record.end("skipped", f"{e.name} is not installed")
    except Exception as e:
        traceback.print_exc()
        record.end("failed", f"{type(e).__name__}: {e}".splitlines()[0])
    else:
        record.end("passed")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
