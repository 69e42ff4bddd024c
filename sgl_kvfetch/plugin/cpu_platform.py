"""The SGLang platform of a machine without an accelerator, switched on by ``KVFETCH_CPU_ENGINE=1``.

SGLang on a plain CPU wants `sgl-kernel` (its rotary embedding, among others). For an out-of-tree platform it uses the
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
    """SGLang's CPU platform, declared out of tree."""

    _enum = PlatformEnum.OOT

    def get_dispatch_key_name(self) -> str:
        """The suffix of the layers' ``forward_...`` methods to use: the ones in plain PyTorch."""
        return "native"


@functools.cache
def is_active() -> bool:
    """Whether the CPU engine is asked for and there is nothing better to run on."""
    return os.environ.get(ENV) == "1" and not torch.accelerator.is_available()


def activate() -> str | None:
    """The entry point of the group ``sglang.srt.platforms``: our platform's name, or None to stay out of the way."""
    return f"{__name__}.{CpuEnginePlatform.__name__}" if is_active() else None
