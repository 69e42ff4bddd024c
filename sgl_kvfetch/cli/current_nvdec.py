"""NVDEC of the machine that a command runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_kvfetch.codecs.nvdec import Nvdec


def open_current_nvdec() -> tuple[Nvdec | None, str]:
    """Of torch's current GPU, and a sentence about it."""
    import torch

    from sgl_kvfetch.codecs import nvdec
    from sgl_kvfetch.cuda_streams import CudaDevice

    if not torch.cuda.is_available():
        return None, f"HEVC is decoded on the CPU: torch {torch.__version__} can use no GPU"
    torch.zeros(1, device="cuda")  # makes the context current that the video libraries look for
    return nvdec.open_nvdec(CudaDevice(torch.device("cuda", torch.cuda.current_device())))
