"""Hooks that let SGLang's host cache run on a CPU. `seams.py` says where each one is installed, and why.

SGLang moves pages between the device pool and the host pool with CUDA operators; here both pools are in host memory,
and PyTorch's indexing does the same.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import torch


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


def without_pinning(pool: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before ``MHATokenToKVPoolHost.__init__``: use plain memory, because pinning it needs a CUDA driver."""
    return (pool, *args), {**kwargs, "pin_memory": False}


def _paged_view(pool: Any, buffer: torch.Tensor, layer_idx: int) -> torch.Tensor:
    """Return one layer of a host pool's K or V buffer, of any layout, as a view [pages, page_size, heads, head_dim]."""
    match pool.layout:
        case "layer_first":  # [layers, slots, heads, head_dim]
            return _split_slots(buffer[layer_idx], pool.page_size)
        case "page_first":  # [slots, layers, heads, head_dim]
            return _split_slots(buffer[:, layer_idx], pool.page_size)
        case "page_first_direct":  # [pages, layers, page_size, heads, head_dim]
            return buffer[:, layer_idx]
        case "page_head":  # [pages, heads, page_size, layers, head_dim]
            return buffer[:, :, :, layer_idx].transpose(1, 2)
        case layout:
            raise ValueError(f"the CPU engine cannot move pages of the host layout {layout!r}")


def _split_slots(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    return slots.view(-1, page_size, *slots.shape[1:])


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
    """Instead of ``MHATokenToKVPoolHost.load_to_device_per_layer``: copy one layer from host slots to device slots."""
    if not is_draft and not 0 <= layer_id < pool.target_layer_num:
        return
    pages, offsets = host_indices // pool.page_size, host_indices % pool.page_size
    for device, host in (
        (pool.device_k_buffers[layer_id], pool.k_buffer),
        (pool.device_v_buffers[layer_id], pool.v_buffer),
    ):
        device[device_indices] = _paged_view(pool, host, layer_id)[pages, offsets]


def backup_layers(
    pool: Any, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
) -> None:
    """Instead of ``MHATokenToKVPoolHost.backup_from_device_all_layer``: copy all layers from device to host slots."""
    pages, offsets = host_indices // pool.page_size, host_indices % pool.page_size
    for layer_idx in range(pool.layer_num):
        for device, host in (
            (pool.device_k_buffers[layer_idx], pool.k_buffer),
            (pool.device_v_buffers[layer_idx], pool.v_buffer),
        ):
            _paged_view(pool, host, layer_idx)[pages, offsets] = device[device_indices]
