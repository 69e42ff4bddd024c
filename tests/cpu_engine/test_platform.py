from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sglang_on_cpu.platform import backup_layers, load_layer

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 3, 5, 4, 2, 6
SHAPES = {
    "layer_first": (LAYERS, PAGES * PAGE_SIZE, HEADS, DIM),
    "page_first": (PAGES * PAGE_SIZE, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE_SIZE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE_SIZE, LAYERS, DIM),
}


def _pool(layout: str, is_mla: bool = False) -> SimpleNamespace:
    buffers = {"kv_buffer": "device_kv_buffers"} if is_mla else {f"{x}_buffer": f"device_{x}_buffers" for x in "kv"}
    on_device = {
        name: tuple(torch.randn(7 * PAGE_SIZE, HEADS, DIM) for _ in range(LAYERS)) for name in buffers.values()
    }
    on_host = {name: torch.full(SHAPES.get(layout, (1,)), torch.nan) for name in buffers}
    sizes = {"page_size": PAGE_SIZE, "layer_num": LAYERS, "target_layer_num": LAYERS}
    return SimpleNamespace(layout=layout, **sizes, **({"kv_lora_rank": DIM} if is_mla else {}), **on_device, **on_host)


def _slots(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE_SIZE) + page * PAGE_SIZE for page in pages])


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_pages_come_back_as_they_were(layout: str, is_mla: bool) -> None:
    pool = _pool(layout, is_mla)
    saved = [*pool.device_kv_buffers] if is_mla else [*pool.device_k_buffers, *pool.device_v_buffers]
    device, host, elsewhere = _slots(6, 1, 2), _slots(4, 0, 3), _slots(0, 3, 5)
    expected = [buffer[device].clone() for buffer in saved]

    backup_layers(pool, None, host, device, "direct")
    for layer in range(LAYERS + 1):  # the host pool lacks the last one, which is skipped
        load_layer(pool, None, host, elsewhere, layer, "direct")

    for buffer, values in zip(saved, expected, strict=True):
        torch.testing.assert_close(buffer[elsewhere], values, rtol=0, atol=0)
    host_buffer = pool.kv_buffer if is_mla else pool.k_buffer
    assert int(host_buffer.isnan().sum()) == host_buffer.numel() * (PAGES - 3) // PAGES


def test_an_unknown_layout_is_named_in_the_error() -> None:
    with pytest.raises(UnsupportedError, match="page_unified"):
        load_layer(_pool("page_unified"), None, _slots(0), _slots(0), 0, "direct")
