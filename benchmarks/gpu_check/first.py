"""What everything else rests on, in the first minute: whether the driver takes registered memory as it is, what
registering shared memory takes, copies in a batch, and whether one cell of each coding is what the CPU makes of it."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu_check import kernels, loads
from benchmarks.gpu_check.record import Record
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.protocol.arena import Arena
from sgl_kvfetch.triton_kernels.restore_exact import fault_on_gpu

_ATTRIBUTES = {  # of CUdevice_attribute
    "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 91,
    "HOST_REGISTER_SUPPORTED": 99,
    "PAGEABLE_MEMORY_ACCESS": 88,
    "ASYNC_ENGINE_COUNT": 40,
}
_SHARED_BYTES, _PIECE_BYTES = 1 << 30, 64 << 20
_COPIED_SPANS, _COPIED_BYTES = 32, 2 << 20  # of a part of 32K tokens from `memory_cache`: two layer groups of a span
_PINNED_BYTES, _LAUNCHES = 1 << 30, 2000


def run(record: Record) -> None:
    torch.zeros(1, device="cuda")
    device = Device(torch.device("cuda", 0))
    read_attributes(record, ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute)
    check_cells(record, device.torch_device)
    loads.measure_copies(record, device, _COPIED_SPANS, _COPIED_BYTES)
    measure_registering(record, device, _SHARED_BYTES, _PIECE_BYTES)
    loads.measure_pinning(record, device, _PINNED_BYTES, _LAUNCHES)


def read_attributes(record: Record, get: Callable[..., int]) -> None:
    """Record attributes of the device. Without the first one, copies in a batch need other addresses. ``get``: the
    driver's function."""
    found = ctypes.c_int()
    for name, number in _ATTRIBUTES.items():
        code = get(ctypes.byref(found), number, 0)
        record.row(
            "Attributes of the device", name=name, number=number, value=found.value if not code else f"error {code}"
        )


def check_cells(record: Record, device: torch.device) -> None:
    """Compare one cell of `klt` with its reference, and one of `exact` with its values."""
    kernels.check(record, device, kernels.CHECKED[1:])
    fault = fault_on_gpu(device)
    record.row("Kernels: bits", kernel="restore_exact", at="a made-up cell", found=fault or "as its values")
    if fault:
        record.fail(f"restore_exact: {fault}")


def measure_registering(record: Record, device: Device, num_bytes: int, piece_bytes: int) -> None:
    """Record what registering and unregistering pieces of shared memory takes, as a loader does: a memfd has small
    pages. Once nobody has touched it before, and once it has been written to."""
    for is_touched in (False, True):
        arena = Arena.create(num_bytes)
        if is_touched:
            arena.whole.zero_()
        pieces, taken_s = torch.split(arena.whole, piece_bytes), list[list[float]]()
        for work in (device.pin, device.unpin):
            taken_s.append([])
            for piece in pieces:
                began_s = time.perf_counter()
                work(piece)
                taken_s[-1].append(time.perf_counter() - began_s)
        registering_s, unregistering_s = taken_s
        record.row(
            "Registering shared memory",
            touched=is_touched,
            mb=piece_bytes / 1e6,
            register_ms=1e3 * statistics.median(registering_s),
            longest_ms=1e3 * max(registering_s),
            unregister_ms=1e3 * statistics.median(unregistering_s),
        )
        arena.close()
