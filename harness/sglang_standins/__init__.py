"""Stand-ins with which SGLang serves a Llama on a GPU whose machine has torch and no `sgl_kernel`.

SGLang pins a release of torch, and needs `sgl_kernel` and flashinfer, which are built for it: hundreds of MB, too much
for a machine without a network that has another torch. A Llama needs few of their functions. `kernels` has these;
SGLang's own PyTorch forms take the place of others; SGLang itself, its scheduler, pool, tree, linker and Triton
attention, is as it was released. **Answers and times are for comparing paths within one run**: RMSNorm, RoPE and
SwiGLU are not those that SGLang ships.

A server gets them from a folder on its ``PYTHONPATH``, which `lay_out` fills: Python imports ``sitecustomize`` from
there in each of its processes. This package has relative imports alone, since it is copied there under another name:
with a checkout on its path, a server could import the folder `triton_kernels`.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_NAME = "sglang_standins"
_SITE = f"""# Written by harness.sglang_standins. Python imports this at its start.
from {_NAME}.finder import install

install()
"""
_SETTINGS = {
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # the other one is compiled
    "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",  # or it is compiled at the start
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), "1"),
    **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"),
    **dict.fromkeys(("SGLANG_HOST_IP", "HOST_IP"), "127.0.0.1"),
}
# For what the stand-ins lack: no CUDA graphs, which were not tried with them.
FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-cuda-graph", "--disable-custom-all-reduce"),
)


def lay_out(folder: Path, log: Path) -> dict[str, str]:
    """Write the stand-ins to a folder. Return the environment of servers that are to use them. ``log``: where their
    processes note what was made up, and what was called and is missing."""
    here = Path(__file__).parent
    shutil.copytree(here, folder / _NAME, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text(_SITE)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**_SETTINGS, "PYTHONPATH": path, "STANDIN_LOG": str(log)}
