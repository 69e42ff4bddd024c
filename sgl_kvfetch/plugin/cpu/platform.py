"""The SGLang platform of a machine without an accelerator, switched on by ``KVFETCH_CPU_ENGINE=1``.

SGLang on a plain CPU needs `sgl-kernel` (its rotary embedding, among others). For an out-of-tree platform it uses the
layers' own PyTorch code, which runs anywhere.
"""

from __future__ import annotations

import functools
import os

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum

ENV = "KVFETCH_CPU_ENGINE"


class CpuEnginePlatform(CpuSRTPlatform):  # type: ignore[misc]
    """SGLang's CPU platform, declared as an out-of-tree platform."""

    _enum = PlatformEnum.OOT

    def get_dispatch_key_name(self) -> str:
        """Return the suffix of the layers' ``forward_...`` methods in plain PyTorch."""
        return "native"

    def support_mamba_cache_extra_buffer(self) -> bool:
        """Return whether states of linear attention may be kept at page boundaries: PyTorch copies them anywhere."""
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True


@functools.cache
def is_active() -> bool:
    """Return whether the CPU engine is requested and there is no accelerator."""
    return os.environ.get(ENV) == "1" and not torch.accelerator.is_available()


def activate() -> str | None:
    """Return our platform's name, or None if it is not active. Entry point of the group ``sglang.srt.platforms``."""
    return f"{__name__}.{CpuEnginePlatform.__name__}" if is_active() else None
