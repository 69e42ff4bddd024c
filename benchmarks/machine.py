"""Describes the machine and the software versions of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

_PACKAGES = ("sgl-kvfetch", "sglang", "torch", "transformers", "av", "PyNvVideoCodec", "triton")


def machine() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": _cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def fast_dtype() -> str:
    """Return the dtype in which this machine computes a model in bfloat16 fastest. Torch multiplies matrices in
    bfloat16 only on CPUs that have instructions for it; elsewhere that takes twenty times as long as in float32."""
    has_bfloat16 = any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))
    return "bfloat16" if torch.cuda.is_available() or has_bfloat16 else "float32"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.machine()
