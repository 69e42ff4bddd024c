"""NVDEC of the GPU that the engine runs on."""

from __future__ import annotations

import logging

import torch

from sgl_kvfetch.codecs.nvdec import Nvdec, open_nvdec
from sgl_kvfetch.cuda_streams import CudaDevice

logger = logging.getLogger(__name__)


def engine_nvdec(device: torch.device) -> Nvdec | None:
    """``device``: the token-to-KV pool's. None if that is no GPU, or its NVDEC decodes none of our codecs; the log says
    which. On the scheduler's thread, where the GPU's context is current."""
    if device.type != "cuda":
        return None
    nvdec, about = open_nvdec(CudaDevice(device))
    logger.info("kvfetch: %s", about)
    return nvdec
