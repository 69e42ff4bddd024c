"""SGLang's platform on a machine without an accelerator, and hooks that let its host cache run there. `seams.py` says
where each hook is installed, and why.

SGLang on a plain CPU needs `sgl-kernel` (its rotary embedding, among others). For an out-of-tree platform it uses the
layers' own PyTorch code, which runs anywhere. SGLang moves pages between its pools with CUDA operators; here both are
in host memory, and indexing does the same.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuSRTPlatform
from sglang.srt.platforms.device_mixin import PlatformEnum
from torch.overrides import TorchFunctionMode


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


def is_active() -> bool:
    """Return whether SGLang is to run on the CPU: there is no accelerator."""
    return not torch.accelerator.is_available()


def activate() -> str | None:
    """Return our platform's name, or None if there is an accelerator. Entry point of the group
    ``sglang.srt.platforms``."""
    return f"{__name__}.{CpuEnginePlatform.__name__}" if is_active() else None


def prepare_children(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let SGLang's processes start by forking, and several ranks share the cores.

    SGLang asks for `spawn` because a CUDA context does not survive a fork. There is none here, and children that need
    not import SGLang again start several times faster. SGLang also requires one NUMA node per rank, unless it is told
    which cores each rank gets.
    """
    multiprocessing.set_start_method("fork", force=True)
    num_ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
    if num_ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::num_ranks] or cores for rank in range(num_ranks)]
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, share)) for share in shares))


def attend_in_latent_space(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let models with MLA read their KV cache as it is stored.

    SGLang would otherwise expand a prompt's latent vectors to K and V, which its PyTorch attention does not expect.
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)


def leave_tensors_unpinned(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let SGLang ask for pinned copies of tensors, and keep the tensors as they are."""
    torch.Tensor.pin_memory = lambda tensor: tensor  # type: ignore[assignment, method-assign, misc]


class _Unpinned(TorchFunctionMode):
    """Within this mode, PyTorch makes tensors in plain memory where it is asked for pinned memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def make_plain_tensors(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Around the methods of ``LoRAManager`` that make pinned tensors: make plain ones."""
    with _Unpinned():
        return original(*args, **kwargs)


def leave_less_memory_free(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let host pools take all of the machine's memory but 1 GiB.

    SGLang leaves 10 GiB free, whatever size a pool is given. Machines without a GPU often have no more than that.
    """
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def send_page_numbers_as_they_are(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let a prefill server send pages with Mooncake over TCP.

    SGLang would otherwise copy the numbers of the pages from the device to pinned memory, and wait for a CUDA event.
    """
    if server_args.disaggregation_transfer_backend == "mooncake" and server_args.disaggregation_mode == "prefill":
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False


def speculate_in_triton(result: None, server_args: Any) -> None:
    """After ``_set_envs_and_config``: let speculation run in Triton's interpreter, with ``TRITON_INTERPRET=1`` and
    ``--attention-backend triton``.

    SGLang has Triton kernels for all of it, but chooses some of them only on Intel's GPUs.
    """
    if server_args.speculative_algorithm is not None:
        from sglang.kernels.ops.speculative import cache_locs, spec_tree

        cache_locs._is_xpu = spec_tree._is_xpu = True


def look_in_window_pool(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    *args: Any,
    sliding_window_size: int | None = None,
    **kwargs: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the two ``TorchNativeAttnBackend._run_sdpa_forward_...``: find a layer's keys in the pool of its window.

    Each pool has its own slots. This backend writes to the slots of the right pool, but looks for them with the slots
    of the other one, which works only while both pools happen to use the same slots.
    """
    if sliding_window_size is not None and backend.use_sliding_window_kv_pool:
        slots = req_to_token[req_pool_indices].long()
        # Tokens in front of the window have no slot there. The mask leaves them out.
        req_to_token = backend.token_to_kv_pool.translate_loc_from_full_to_swa(slots).clamp(min=0)
        req_pool_indices = torch.arange(len(slots))
    positional = backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, *args
    return positional, {**kwargs, "sliding_window_size": sliding_window_size}


def without_pinning(pool: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``HostKVCache.__init__``: use plain memory, because pinning it needs a CUDA driver."""
    return (pool, *args), {**kwargs, "pin_memory": False}


def load_layer(
    pool: Any,
    device_pool: Any,
    host_indices: torch.Tensor,
    device_indices: torch.Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """Instead of a host pool's ``load_to_device_per_layer``: copy one layer from host slots to device slots."""
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    pages, offsets = host_indices // pool.page_size, host_indices % pool.page_size
    for device, host_pages in _buffers(pool):
        device[layer_id][device_indices] = host_pages[pages, offsets, layer_id]


def backup_layers(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Instead of a host pool's ``backup_from_device_all_layer``: copy all layers from device to host slots."""
    pages, offsets = host_indices // pool.page_size, host_indices % pool.page_size
    for device, host_pages in _buffers(pool):
        for layer_idx in range(pool.layer_num):
            host_pages[pages, offsets, layer_idx] = device[layer_idx][device_indices]


def copy_by_indexing(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the functions that copy Mamba states: copy as for an NPU, which SGLang does with PyTorch."""
    return args, {**kwargs, "io_backend": "kernel_ascend"}


def _buffers(pool: Any) -> list[tuple[Sequence[torch.Tensor], torch.Tensor]]:
    """Return the device's buffers, one a layer, and the host's pages, of K and V or of MLA's latent vectors."""
    from sgl_kvfetch.plugin.host.pool import is_mla, pages_view  # not while SGLang looks for its platform

    if is_mla(pool):
        found = [(pool.device_kv_buffers, pool.kv_buffer)]
    else:
        found = [(pool.device_k_buffers, pool.k_buffer), (pool.device_v_buffers, pool.v_buffer)]
    return [(device, pages_view(host, pool.layout, pool.page_size)) for device, host in found]
