"""A pool in a fake GPU's memory. A model that is small enough for Triton's interpreter, servers that write and read its
prompts, and what of them is in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from harness import stand_in_pool
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.protocol import quantiser
from sgl_kvfetch.protocol.arena import StagedCode
from sgl_kvfetch.triton_kernels.ans import ans_decode_table
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile
from tests.plugin.device import rig as device_rig
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.rig import Request, Rig

GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=48, v_head_dim=64, page_size=4, dtype="bfloat16")
NUM_SLOTS = 512
PLACES = [30, 2, 7, 9, 21, 4, 11, 12]
LAYERS, HEADS, DIM = 3, 2, 8


def make_pool(geometry: KVGeometry = GEOMETRY) -> MHATokenToKVPool:
    pool: MHATokenToKVPool = stand_in_pool.make_pool(geometry, NUM_SLOTS)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.fill_(float("nan"))
    return pool


def make_pages(device: FakeDevice, geometry: KVGeometry = GEOMETRY, **sizes: Any) -> CudaPages:
    return CudaPages(make_pool(geometry), geometry.page_size, device, device.forward, **sizes)


def slots_of(pool_pages: list[int], page_size: int = 4) -> torch.Tensor:
    return torch.tensor([page * page_size + i for page in pool_pages for i in range(page_size)])


def set_slots(pages: CudaPages, pool_pages: list[int], value: float) -> None:
    """Overwrite slots, as a forward pass may do."""
    for layer in range(pages.geometry.num_layers):
        for buffer in pages.layer_buffers(layer):
            buffer[slots_of(pool_pages)] = value


def use_small_model(monkeypatch: pytest.MonkeyPatch, num_heads: int = HEADS) -> None:
    """Let rigs have this model. The CPU's fastest products round more than one in float32, so they are not used."""
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)
    monkeypatch.setattr(quantiser, "SPAN_TOKENS", 32)
    for name, value in (("LAYERS", LAYERS), ("HEADS", num_heads), ("DIM", DIM)):
        monkeypatch.setattr(device_rig, name, value)


def make_quantiser(num_heads: int = HEADS, num_layers: int = LAYERS, num_sinks: int = 0) -> KltQuantiser:
    rope = Rope(inv_freq=tuple(100.0 ** (-i / 4) for i in range(4)))
    shape: dict[str, Any] = {"num_layers": num_layers, "num_heads": num_heads, "head_dim": DIM, "num_sinks": num_sinks}
    return KltQuantiser(make_profile(**shape, cell_layers=2, cell_heads=1, rope=rope), step=0.25)


def written(make: MakeRig, *prompts: list[int], **config: Any) -> list[torch.Tensor]:
    """Let a server without a GPU write prompts, by `klt` unless the config names another quantiser. Return what it
    restores of the last one."""
    cpu = make(**_of_klt() | config)
    for tokens in prompts:
        cpu.stored(tokens)
    return loaded(cpu, prompts[-1])


def reader(make: MakeRig, gpu: FakeDevice | None = None, **config: Any) -> Rig:
    """Return a server with a GPU that writes nothing."""
    return make(**_of_klt() | {"gpu": gpu or FakeDevice(), "mode": "read_only"} | config)


def _of_klt() -> dict[str, Any]:
    return {"quantiser": make_quantiser(), "codec": "ans", "num_layers": LAYERS}


def loaded(rig: Rig, tokens: list[int], request: Request | None = None) -> list[torch.Tensor]:
    """Return what the tree has of a prompt after it was admitted, layer by layer, K then V. ``request``: one that waits
    for admission."""
    assert rig.admit(request or rig.arrive_staged(tokens)) == [len(tokens)]
    slots = rig.slots_of(tokens)
    assert len(slots) == len(tokens)
    return [buffer[slots] for buffer in (*rig.pool.k_buffer, *rig.pool.v_buffer)]


def assert_close(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Sums are taken in another order."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def decode_wrongly(data: torch.Tensor, table: torch.Tensor, num_energies: int, out: torch.Tensor, *args: Any) -> None:
    """`ans_decode_table` of a broken GPU."""
    ans_decode_table(data, table, num_energies, out, *args)
    out[0] ^= 1


def loader_of(rig: Rig) -> GpuLoader:
    loader = rig.linker._loader
    assert isinstance(loader, GpuLoader)
    return loader


def code_of(rig: Rig, request: Request) -> StagedCode | None:
    """Return the cells that are staged for a request as they are coded; None if values are."""
    code: StagedCode | None = rig.linker.prefixes._prefixes[request.rid].state.values.code
    return code


def staged(rig: Rig, tokens: list[int]) -> tuple[Request, Any]:
    """Return a request that waits for admission, and the chunks of its cells."""
    request = rig.arrive_staged(tokens)
    code = code_of(rig, request)
    assert code is not None
    return request, code.chunks


def left(rig: Rig, request: Request) -> None:
    """Let a request leave, and wait until the data plane knows it."""
    rig.linker.prefixes.leave(request.rid)
    rig.hear_plane()
