from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sgl_kvfetch.errors import UnsupportedError
from sglang_on_cpu.platform import backup_layers, load_layer, without_pinning

LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 3, 5, 4, 2, 6
SHAPES = {
    "layer_first": (LAYERS, PAGES * PAGE_SIZE, HEADS, DIM),
    "page_first": (PAGES * PAGE_SIZE, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE_SIZE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE_SIZE, LAYERS, DIM),
}


def _pool(layout: str, is_mla: bool = False) -> SimpleNamespace:
    slots = 7 * PAGE_SIZE
    if is_mla:
        return SimpleNamespace(
            layout=layout,
            page_size=PAGE_SIZE,
            layer_num=LAYERS,
            target_layer_num=LAYERS,
            kv_lora_rank=DIM,
            kv_buffer=torch.full(SHAPES[layout], torch.nan),
            device_kv_buffers=tuple(torch.randn(slots, HEADS, DIM) for _ in range(LAYERS)),
        )
    return SimpleNamespace(
        layout=layout,
        page_size=PAGE_SIZE,
        layer_num=LAYERS,
        target_layer_num=LAYERS,
        k_buffer=torch.full(SHAPES.get(layout, (1,)), torch.nan),
        v_buffer=torch.full(SHAPES.get(layout, (1,)), torch.nan),
        device_k_buffers=tuple(torch.randn(slots, HEADS, DIM) for _ in range(LAYERS)),
        device_v_buffers=tuple(torch.randn(slots, HEADS, DIM) for _ in range(LAYERS)),
    )


def _slots(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(PAGE_SIZE) + page * PAGE_SIZE for page in pages])


@pytest.mark.parametrize("is_mla", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_pages_come_back_as_they_were(layout: str, is_mla: bool) -> None:
    pool = _pool(layout, is_mla)
    saved = [*pool.device_kv_buffers] if is_mla else [*pool.device_k_buffers, *pool.device_v_buffers]
    device, host, elsewhere = _slots([6, 1, 2]), _slots([4, 0, 3]), _slots([0, 3, 5])
    expected = [buffer[device].clone() for buffer in saved]

    backup_layers(pool, None, host, device, "direct")
    for layer in range(LAYERS):
        load_layer(pool, None, host, elsewhere, layer, "direct")

    for buffer, values in zip(saved, expected, strict=True):
        torch.testing.assert_close(buffer[elsewhere], values, rtol=0, atol=0)
    host_buffer = pool.kv_buffer if is_mla else pool.k_buffer
    assert int(host_buffer.isnan().sum()) == host_buffer.numel() * (PAGES - 3) // PAGES


def test_layers_that_the_host_pool_lacks_are_skipped() -> None:
    pool = _pool("layer_first")
    before = [buffer.clone() for buffer in pool.device_k_buffers]
    load_layer(pool, None, _slots([0]), _slots([0]), LAYERS, "direct")
    assert all(torch.equal(a, b) for a, b in zip(before, pool.device_k_buffers, strict=True))


def test_an_unknown_layout_is_named_in_the_error() -> None:
    with pytest.raises(UnsupportedError, match="page_unified"):
        load_layer(_pool("page_unified"), None, _slots([0]), _slots([0]), 0, "direct")


def test_memory_is_never_pinned() -> None:
    args, kwargs = without_pinning("pool", "info", pin_memory=True, layout="page_first")
    assert args == ("pool", "info")
    assert kwargs == {"pin_memory": False, "layout": "page_first"}
