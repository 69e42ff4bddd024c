from __future__ import annotations

import gc
import random
import threading

import pytest
import torch

from sgl_kvfetch.protocol.arena import Arena, Room, StridedPages, pages_in, tensors_in
from sgl_kvfetch.types import KVGeometry


def test_allocations_never_overlap_and_all_bytes_are_freed() -> None:
    rng = random.Random(0)
    room = Room(1 << 16)
    taken: dict[int, int] = {}
    for _ in range(5000):
        if taken and rng.random() < 0.5:
            offset = rng.choice(list(taken))
            del taken[offset]
            room.free(offset)
        else:
            size = rng.randrange(1, 1 << 13)
            offset_or_none = room.allocate(size, 0)
            if offset_or_none is not None:
                assert offset_or_none % 64 == 0
                assert offset_or_none + size <= 1 << 16
                assert all(o + s <= offset_or_none or offset_or_none + size <= o for o, s in taken.items())
                taken[offset_or_none] = size
    for offset in taken:
        room.free(offset)
    assert room._taken == {}
    assert room.allocate(1 << 16, 0) == 0


@pytest.mark.parametrize("is_closed", [True, False])
def test_allocate_waits_for_room_or_for_the_end(is_closed: bool) -> None:
    room = Room(1024)
    assert room.allocate(1024) == 0
    assert room.allocate(64, 0.01) is None
    found: list[int | None] = []
    waiting = threading.Thread(target=lambda: found.append(room.allocate(1024)))
    waiting.start()
    room.close() if is_closed else room.free(0)
    waiting.join(60)
    assert found == [None if is_closed else 0]


def test_what_is_lent_comes_back_when_no_tensor_refers_to_it() -> None:
    arena, returned = Arena.create(1 << 12), []
    lent = arena.lend(64, 256, lambda: returned.append(True))
    k, v = tensors_in(lent, torch.float32, [(2, 16), (32,)])
    k.fill_(1.0)
    v.fill_(2.0)
    assert arena.view(64, torch.float32, (64,)).tolist() == [1.0] * 32 + [2.0] * 32
    del lent, v
    gc.collect()
    assert not returned
    del k
    gc.collect()
    assert returned == [True]
    arena.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_pages_lie_layer_by_layer_wherever_they_come_from(dtype: str) -> None:
    geometry = KVGeometry(num_layers=3, num_heads=2, k_head_dim=8, v_head_dim=16, page_size=4, dtype=dtype)
    shape = 2, 9, 2, 3, 4, 16 * geometry.torch_dtype.itemsize
    whole = torch.randint(0, 256, shape, dtype=torch.uint8).view(geometry.torch_dtype)
    views = [x.permute(0, 3, 2, 1, 4)[..., :dim] for x, dim in zip(whole, (8, 16), strict=True)]
    memory, pages = torch.full((64 + 5 * geometry.page_bytes + 64,), 0xEE, dtype=torch.uint8), [7, 1, 2, 3, 0]
    assert StridedPages(views).read_into(pages, memory, 64)
    for view, found in zip(views, pages_in(memory[64:-64], geometry, len(pages)), strict=True):
        for page, copied in zip(pages, found, strict=True):
            assert torch.equal(copied.contiguous().view(torch.uint8), view[page].contiguous().view(torch.uint8))
        assert all(found[:, :, layer].is_contiguous() for layer in range(3))
    assert bool((memory[:64] == 0xEE).all())
    assert bool((memory[-64:] == 0xEE).all())
