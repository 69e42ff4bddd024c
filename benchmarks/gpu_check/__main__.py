"""``python -m benchmarks.gpu_check``: see the package. This module needs only Python's standard library."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import benchmarks.gpu_check
from benchmarks.gpu_check import bundle, driver_libraries, report
from benchmarks.gpu_check.runner import STEPS, TOTAL_S, Result, Step, run_step, skipped

_OUT = Path(__file__).parents[2] / "out"  # which git ignores
_LEAST_S = 5.0  # with less time left, a step is skipped


def main(arguments: Sequence[str] | None = None) -> int:
    first, *others = STEPS
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=(benchmarks.gpu_check.__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: out, if there is a GPU)")
    parser.add_argument("--only", nargs="+", metavar="STEP", choices=[step.name for step in others], help="these steps")
    parser.add_argument("--bundle", type=Path, metavar="DIR", help="pack this for a machine without a network, and end")
    parser.add_argument("--with-sglang", action="store_true", help="with --bundle: pack SGLang, too, as a second part")
    options = parser.parse_args(arguments)
    if options.bundle:
        print(*bundle.make(options.bundle, with_sglang=options.with_sglang), sep="\n")
        return 0
    chosen = [step for step in others if not options.only or step.name in options.only]
    results: list[Result] = []
    written: list[Path] = []

    def write(found: list[Result]) -> None:
        gpu = gpu_of(found[0])
        folder: Path | None = options.out or (_OUT if gpu else None)
        written[:] = [] if folder is None else report.write(found, folder, gpu)

    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        # As soon as it is found: whoever lends the machine may end the run.
        for result in run(first, chosen, Path(scratch), lambda part: write([*results, part])):
            print(report.summary([result]), flush=True)
            results.append(result)
            write(results)
    print("wrote" if written else "no GPU: nothing was measured or written", *written)
    return 1 if any(result.outcome == "failed" for result in results) else 0


def run(first: Step, others: Sequence[Step], folder: Path, progress: Callable[[Result], object]) -> Iterator[Result]:
    """Yield the results of the steps. ``progress``: see `run_step`."""
    deadline_s = time.monotonic() + TOTAL_S
    machine = run_step(first, folder, first.limit_s, progress)
    if machine.outcome == "passed":
        machine.notes.extend(driver_libraries.complete(folder / "libraries"))
    yield machine
    for step in others:
        left_s = deadline_s - time.monotonic()
        if step.needs_gpu and machine.outcome != "passed":
            yield skipped(step, machine.reason)
        elif left_s < _LEAST_S:
            yield skipped(step, f"the {TOTAL_S:.0f} s for the whole run are over")
        else:
            yield run_step(step, folder, min(step.limit_s, left_s), progress)


def gpu_of(machine: Result) -> str | None:
    return next((row["is"] for row in machine.rows if row.get("what") == "gpu"), None)


if __name__ == "__main__":
    raise SystemExit(main())
