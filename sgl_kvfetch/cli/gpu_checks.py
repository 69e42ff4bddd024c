"""Checks of the GPU and its video engines."""

from __future__ import annotations

import importlib
import os

from sgl_kvfetch.cli.checks import Check, first_line
from sgl_kvfetch.cli.current_nvdec import open_current_nvdec

CPU_ENGINE_ENV = "KVFETCH_CPU_ENGINE"
INSTALL = 'pip install "sgl-kvfetch[gpu]"'
_CPU_CODECS = "codecs run on the CPU"


def check_gpu() -> list[Check]:
    """Check the GPU and its video engines."""
    import torch

    if not torch.cuda.is_available():
        advice = "nothing on this machine; if servers have a GPU, run doctor there"
        engines = [Check(name, "warn", f"no GPU; {_CPU_CODECS}", advice) for name in ("NVDEC", "NVENC")]
        return [_without_gpu(torch.__version__), *engines]
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.device_count()
    found = f"{count} x {torch.cuda.get_device_name()}, compute capability {major}.{minor}, torch {torch.__version__}"
    torch.zeros(1, device="cuda")  # the video libraries need a current CUDA context
    return [Check("CUDA GPU", "yes", found), *_check_nvdec(), _check_decoding(), _check_nvenc()]


def _without_gpu(torch_version: str) -> Check:
    if os.environ.get(CPU_ENGINE_ENV) == "1":
        advice = "nothing if you only run tests; serve models from a machine with a GPU"
        return Check("CUDA GPU", "warn", f"none (torch {torch_version}); {CPU_ENGINE_ENV}=1 is set", advice)
    advice = (
        f"set {CPU_ENGINE_ENV}=1 to run SGLang on this CPU, for tests; "
        "if there is a GPU, check nvidia-smi and install a CUDA build of torch"
    )
    return Check("CUDA GPU", "warn", f"torch {torch_version} finds no usable GPU", advice)


def _check_nvdec() -> list[Check]:
    from sgl_kvfetch.codecs.nvdec_caps import decode_caps

    binding = _check_binding()
    try:
        found = decode_caps()
    except OSError as e:
        advice = "install the driver's video libraries (containers: NVIDIA_DRIVER_CAPABILITIES=compute,video,utility)"
        return [binding, Check("NVDEC", "warn", f"{first_line(e)}; {_CPU_CODECS}", advice)]
    if (caps := found.get("hevc")) is not None:
        size = f"up to {caps.max_width}x{caps.max_height}"
        return [binding, Check("NVDEC", "yes", f"HEVC 4:4:4 8-bit, {caps.num_engines} engines, {size}")]
    if (caps := found.get("hevc420")) is not None:
        advice = 'write with codec = "hevc420", which this GPU decodes'
        return [binding, Check("NVDEC", "warn", f"HEVC 4:2:0 only, {caps.num_engines} engines", advice)]
    return [binding, Check("NVDEC", "warn", f"decodes no HEVC; {_CPU_CODECS}", 'write with codec = "zstd"')]


def _check_decoding() -> Check:
    """Decode two pictures with the decoder that a server would use."""
    name = "HEVC decoding"
    nvdec, about = open_current_nvdec()
    if nvdec is not None:
        return Check(name, "yes", about)
    return Check(name, "warn", about, "see PyNvVideoCodec and NVDEC; until then zstd decodes faster than HEVC on a CPU")


def _check_binding() -> Check:
    name = "PyNvVideoCodec"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return Check(name, "warn", f"not installed; {_CPU_CODECS}", INSTALL)
    except Exception as e:  # it loads the driver's libraries
        return Check(name, "warn", f"does not import: {first_line(e)}", "update the NVIDIA driver, then: " + INSTALL)
    return Check(name, "yes", str(getattr(module, "__version__", "installed")))


def _check_nvenc() -> Check:
    """Encode a few pictures on NVENC."""
    from sgl_kvfetch.codecs.nvenc import open_nvenc

    encoders, about = open_nvenc(("hevc", "hevc420"), num_sessions=1)
    if encoders:
        return Check("NVENC", "yes", about)
    return Check("NVENC", "warn", about, "nothing: encoding runs on the CPU (H100, H200 and A100 have no NVENC)")
