"""The steps, in the order in which they run. The time limits of those that are not extra add up to at most that of the
whole run."""

from __future__ import annotations

from dataclasses import dataclass

TOTAL_S = 565.0


@dataclass(frozen=True)
class Step:
    """``runs``: the step's function as ``module:name``. It takes a `Record`. ``is_extra``: it runs if ``--only`` names
    it."""

    name: str
    title: str
    runs: str
    limit_s: float
    needs_gpu: bool = True
    is_extra: bool = False


_HERE = "benchmarks.gpu_check"

# The first step finds out whether there is a GPU.
STEPS = (
    Step("machine", "Hardware, driver, versions", f"{_HERE}.facts:run", 25, needs_gpu=False),
    Step("kernels", "Kernels against their references and a device copy", f"{_HERE}.kernels:run", 55),
    Step("ans", "ans: bits, checksums and speed", f"{_HERE}.ans:run", 30),
    Step("quantise", "klt quantised on the device: integers and speed", f"{_HERE}.quantise:run", 10),
    Step("nvdec", "NVDEC: bits, throughput, decoders", f"{_HERE}.nvdec:run", 130),
    Step("loads", "Loads of 32K tokens: values, time, memory, forward passes", f"{_HERE}.loads:run", 75),
    Step("interference", "A matrix product beside decoding", f"{_HERE}.interference:run", 45),
    Step("sglang", "SGLang in device mode", f"{_HERE}.server:run", 110),
    Step("sglang_8b", "SGLang in device mode: times", f"{_HERE}.server:run_large", 280, is_extra=True),
    Step("tests", "pytest -m gpu", f"{_HERE}.tests:run", 45),
    # Last: it may leave the decoder or the driver in a bad state.
    Step("nvdec_damage", "NVDEC: damaged bitstreams", f"{_HERE}.nvdec_damage:run", 40),
)
