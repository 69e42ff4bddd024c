"""Opens NVDEC on the GPU that the engine runs on."""

from __future__ import annotations

import logging

import torch

from sgl_kvfetch.codecs.nvdec import Nvdec, open_nvdec
from sgl_kvfetch.cuda_streams import CudaDevice

logger = logging.getLogger(__name__)


def engine_nvdec(device: torch.device) -> Nvdec | None:
    """Return NVDEC of ``device``, which holds the token-to-KV pool. None if it is no GPU, or if its NVDEC decodes none
    of our codecs; the log says which. Call on the scheduler's thread, where the GPU's context is current."""
    if device.type != "cuda":
        return None
    nvdec, about = open_nvdec(CudaDevice(device))
    logger.info("kvfetch: %s", about)
    return nvdec
