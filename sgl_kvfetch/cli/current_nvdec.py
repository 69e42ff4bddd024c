"""Access to this machine's NVDEC for the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sgl_kvfetch.codecs.nvdec import Nvdec


def open_current_nvdec() -> tuple[Nvdec | None, str]:
    """Return NVDEC of torch's current GPU, or None, and a sentence that describes it or says why it is missing."""
    import torch

    from sgl_kvfetch.codecs import nvdec
    from sgl_kvfetch.cuda_streams import CudaDevice

    if not torch.cuda.is_available():
        return None, f"HEVC is decoded on the CPU: torch {torch.__version__} finds no usable GPU"
    torch.zeros(1, device="cuda")  # the video libraries need a current CUDA context
    return nvdec.open_nvdec(CudaDevice(torch.device("cuda", torch.cuda.current_device())))
