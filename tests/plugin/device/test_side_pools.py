"""Device mode with windows in a pool of their own, and with SGLang's own tree, allocators and pools: on the CPU, and on
a fake GPU, where states are tried as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    MHATokenToKVPool,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from torch.overrides import TorchFunctionMode

from sgl_kvfetch.codec import CellValues
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import store
from sgl_kvfetch.plane.fetch.fetcher import FetchResult
from sgl_kvfetch.plugin.device import gpu_loads, gpu_pages
from sgl_kvfetch.plugin.device.gpu_loads import GpuLoader
from sgl_kvfetch.plugin.device.pools import EnginePools, Load, SideBuffers, SideSlots, open_pools
from sgl_kvfetch.plugin.host.pool import HostPages, pages_view
from sgl_kvfetch.plugin.host.side_pools import PACKED, SidePools
from sgl_kvfetch.protocol.arena import StagedValues
from tests.plugin.backends import DIM, HEADS, LAYERS, PAGE_SIZE, POOL_PAGES, make_mla_pool, make_pool, make_states
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import make_pages, slots_of
from tests.plugin.device.rig import Rig, prompt

pytestmark = pytest.mark.slow

WINDOW = 8  # tokens: two pages


KINDS: dict[str, dict[str, Any]] = {"windows": {"window": WINDOW}} | {
    kind: {"following": kind} for kind in ("draft", "packed", "indexer")
}


def of_place(place: str) -> dict[str, Any]:
    """Return how a rig is made: with SGLang's tree in Python or Rust, or on a GPU."""
    return {"gpu": FakeDevice(seed=1)} if place == "on a GPU" else {"core": place}


@pytest.fixture(
    params=[
        *(("windows", place) for place in ("python", "rust", "on a GPU")),
        *(("draft", "python"), ("packed", "rust"), ("indexer", "python")),
        *((kind, "on a GPU") for kind in ("draft", "packed", "indexer")),
    ],
    ids=" ".join,
)
def rig(make: MakeRig, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """With windows, or with a side pool that has the slots of K and V: a page has one for each page of these. Scratch
    memory and the read buffer of a GPU have room for a page's row of one layer alone. Whatever is written together is a
    segment, however long its pages take to come."""
    kind, place = request.param
    row_bytes = PAGE_SIZE * 2 * 48 * 4
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", 4 * row_bytes)
    monkeypatch.setattr(gpu_pages.CudaPages.__init__, "__kwdefaults__", {"read_buffer_bytes": row_bytes})
    monkeypatch.setattr(store, "_LINGER_S", 600.0)
    return make(**KINDS[kind], **of_place(place))


def holds(rig: Rig, tokens: Sequence[int], of_window: int = WINDOW) -> bool:
    """Return whether the tree has these tokens, with all that they need."""
    return rig.holds(tokens, len(tokens)) and (rig.windows is None or rig.holds_window(tokens, of_window))


def test_a_conversation_goes_on_from_a_stored_prefix(rig: Rig) -> None:
    """Each turn's end is stored with its side pages, also behind a prefix that was itself loaded."""
    tokens = rig.stored(prompt(0))
    for turn in range(1, 3):
        longer = tokens + prompt(turn, 3)
        assert rig.fetch(longer) == len(tokens)
        assert holds(rig, longer)
        rig.write_all()
        rig.flush()
        tokens = longer
    rig.compute(tokens[:-4])  # what the tree has is not loaded; the window begins there
    assert rig.fetch(tokens) == 4
    assert holds(rig, tokens)


def test_a_prompt_that_shares_a_part_gets_the_side_pages_of_it(rig: Rig) -> None:
    tokens = rig.stored(prompt(0))
    other = tokens[:20] + prompt(1, 3)
    assert rig.fetch(other) == 20
    assert holds(rig, other, 12 + WINDOW)


def test_requests_at_once(rig: Rig) -> None:
    """Each has its own window. Of other side pools, the second one waits for what the first one brings."""
    shared = prompt(0)
    longer = shared + prompt(1, 2)
    rig.stored(longer)
    first, second = rig.arrive(shared), rig.arrive(longer)
    rig.await_unparked(first)
    assert rig.windows is not None or rig.is_parked(second)
    if rig.windows is not None:
        rig.await_unparked(second)
    assert rig.admit(first) == [32]
    rig.await_unparked(second)
    assert sum(rig.admit(second)) in ((8,) if rig.windows is None else (8, 40))  # the tree may have the first one's
    assert holds(rig, longer)


@pytest.mark.parametrize("fault", ["missing", "damaged"])
def test_pages_without_their_side_pages_are_computed_and_stored_again(rig: Rig, tmp_path: Path, fault: str) -> None:
    tokens = rig.stored(prompt(0))
    manifests = [decode_manifest(path.read_bytes()) for path in tmp_path.rglob("*.kvm")]
    for path in (tmp_path / manifest.data_name(side) for manifest in manifests for side in manifest.sides):
        if fault == "missing":
            path.unlink()
        else:
            content = bytearray(path.read_bytes())
            content[-len(content) // 8] ^= 1  # of the prompt's end
            path.write_bytes(content)
    request = rig.arrive_staged(tokens)
    rig.served.wait_until_idle()  # the store deletes the segment
    (num_loaded,) = rig.admit(request)
    # A window is for the end of a prefix; of other side pools, pages in front of the damaged one are of use.
    assert num_loaded == 0 if rig.windows is not None or fault == "missing" else 0 < num_loaded < 32
    assert holds(rig, tokens)
    rig.write_all()
    rig.flush()
    assert rig.fetch(tokens) == 32
    assert holds(rig, tokens)


def test_side_pages_are_not_waited_for_behind_late_pages(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make(following="packed")
    tokens = rig.stored(prompt(0))
    monkeypatch.setattr(rig.service.client.fetcher, "fetch", AsyncMock(return_value=FetchResult(1, late=True)))
    monkeypatch.setattr(rig.service._prompts.sides, "_store", Mock(read=lambda *_: asyncio.Event().wait()))
    assert rig.admit(rig.arrive_staged(tokens)) == [0]


def test_side_pages_of_nodes_before_are_written_where_the_store_lost_them(rig: Rig) -> None:
    """A window begins before its node, which is shorter than it."""
    rig.compute(prompt(0))
    rig.write_all()
    rig.parts.plane.clear()
    rig.linker._offloads.forget_stored()
    longer = rig.stored(prompt(0) + prompt(1, 1))
    assert rig.fetch(longer) == 36
    assert holds(rig, longer)


@pytest.mark.parametrize(
    ("kind", "place", "num_tokens"),
    [("draft", "python", 32), ("packed", "rust", 33), ("draft", "on a GPU", 35), ("packed", "on a GPU", 32)],
)
def test_drafts_that_go_by_pairs_of_tokens_are_loaded(make: MakeRig, kind: str, place: str, num_tokens: int) -> None:
    """A page ends with the pair of its last token and the one behind it. So a prompt that ends there, or goes on with
    another token, has one page less."""
    rig = make(following=kind, has_pairs=True, **of_place(place))
    tokens, num_stored = (prompt(0) + prompt(1))[:num_tokens], 28 if num_tokens == 32 else 32
    rig.stored(tokens)
    assert rig.fetch(tokens) == num_stored
    assert rig.holds(tokens, num_stored)
    for shared, num_loaded in ((20, 16), (21, 20), (num_tokens, num_stored)):
        rig.flush()
        other = tokens[:shared] + prompt(2)
        assert rig.fetch(other) == num_loaded
        assert rig.holds(other, (shared + 31) // 4 * 4)
        rig.write_all()
    rig.flush()
    assert rig.fetch(other) == (num_tokens + 31) // 4 * 4
    assert rig.holds(other, (num_tokens + 31) // 4 * 4)


def test_a_state_s_page_is_that_of_the_host_pool() -> None:
    host = make_states()
    states = [host.temporal_buffer, *host.conv_buffer]
    dtypes = torch.bfloat16, torch.bfloat16, torch.float32
    buffers = [state[:, layer, 0].clone() for state in states for layer in range(state.shape[1])]
    assert_equal_pages("mamba", host, SideBuffers(buffers, 1, *dtypes), 2)


def following(
    pool: Any, page_size: int = PAGE_SIZE, *others: ComponentType, draft: Any = None, packed: Sequence[Any] = ()
) -> EnginePools:
    """Open the pools of a model with full attention, and of what has the slots of K and V. ``others``: what the tree
    keeps beside full attention."""
    allocator = SimpleNamespace(get_kvcache=lambda: pool)
    drafts = {"sidecar_draft_device_pools": () if draft is None else (draft,), "mtp_draft_device_pools": packed}
    params = SimpleNamespace(token_to_kv_pool_allocator=allocator, page_size=page_size, **drafts)
    params.mtp_draft_mamba_pools, params.swa_retain_window = (), 0
    return open_pools(params, {ComponentType.FULL, *others})


def plain_pool(num_layers: int = LAYERS) -> MHATokenToKVPool:
    return MHATokenToKVPool(POOL_PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, HEADS, DIM, num_layers, "cpu", False)


def latent_pool(num_layers: int = LAYERS) -> MLATokenToKVPool:
    return MLATokenToKVPool(POOL_PAGES * PAGE_SIZE, PAGE_SIZE, torch.float32, 48, 16, num_layers, "cpu", False)


def fill(drafts: Sequence[Any], host: Any, first_layer: int) -> None:
    """Let pools of draft layers have what the host pool has of its layers, from this one on."""
    for number, (draft, layer) in enumerate(((x, layer) for x in drafts for layer in range(x.layer_num)), first_layer):
        is_mla = isinstance(draft, MLATokenToKVPool)
        of_draft = [draft.kv_buffer] if is_mla else [draft.k_buffer, draft.v_buffer]
        for buffers, x in zip(of_draft, [host.kv_buffer] if is_mla else host.kv_buffer, strict=True):
            values = pages_view(x, host.layout, PAGE_SIZE).flatten(0, 1)
            buffers[layer][: len(values)] = values[:, number]


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
@pytest.mark.parametrize("is_mla", [False, True], ids=["MHA", "MLA"])
@pytest.mark.parametrize("is_packed", [False, True], ids=["a draft model", "packed layers"])
def test_a_page_of_draft_layers_is_that_of_the_host_pool(layout: str, is_mla: bool, is_packed: bool) -> None:
    """The last two layers of the host pool are MTP's, if they are packed."""
    host: Any = make_mla_pool(layout) if is_mla else make_pool(layout)
    make_device = latent_pool if is_mla else plain_pool
    if is_packed:
        host.target_layer_num, drafts = LAYERS - 2, [make_device(1) for _ in range(2)]
        fill(drafts, host, host.target_layer_num)
        pools = following(make_device(3), packed=drafts)
        assert_equal_pages(PACKED, HostPages(host).packed, pools.side_buffers[PACKED], 3 * PAGE_SIZE)
        return
    draft: Any = make_device(LAYERS)
    fill([draft], host, 0)
    pools = following(make_device(LAYERS), draft=draft)
    if not is_mla:
        host.kv_buffer = torch.stack(host.kv_buffer)
    assert_equal_pages("draft", host, pools.side_buffers["draft"], 3 * PAGE_SIZE)


def test_a_page_of_an_indexer_s_keys_is_that_of_the_host_pool() -> None:
    """Layers that take the choice of the layer before have none. MTP's, which is packed, has."""
    size, num_pages = 64, 8
    flags: dict[str, Any] = {"kv_lora_rank": 48, "qk_rope_head_dim": 16, "index_head_dim": 128, "kv_cache_dim": 64}
    flags |= {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
    flags |= {"index_buf_size": num_pages * size}
    model = DSATokenToKVPool(num_pages * size, size, layer_num=3, skip_topk_layers=[False, True, False], **flags)
    draft = DSATokenToKVPool(num_pages * size, size, layer_num=1, **flags)
    keys = [x for pool in (model, draft) for x in pool.index_k_with_scale_buffer if len(x)]
    for number, x in enumerate(keys):
        x.copy_(torch.randint(256, x.shape, generator=torch.Generator().manual_seed(number)))
    content = torch.stack(keys, dim=1)[:, :, None].contiguous()  # (pages, layers, 1, bytes)
    host: Any = object.__new__(DSAIndexerPoolHost)
    vars(host).update(layout="page_first_direct", page_size=size, index_k_with_scale_buffer=content, layer_num=3)
    vars(host).update(dtype=model.store_dtype, indexer_page_stride_size=keys[0].shape[1], indexer_dtype=torch.uint8)
    pools = following(model, size, packed=[draft])
    assert pools.following == ("indexer", PACKED)
    assert pools.layers == range(3)
    assert_equal_pages("indexer", host, pools.side_buffers["indexer"], 3 * size)


def test_a_page_of_plain_keys_of_an_indexer_is_that_of_the_host_pool() -> None:
    sparse = {"sparse_layer_ids": [1, 2], "disable_value_sparse_layer_ids": [1, 2], "dense_layer_ids": [0]}
    shape = {"head_num": HEADS, "head_dim": DIM, "idx_head_dim": 32, "start_layer": 0, "end_layer": 3, **sparse}
    model = MiniMaxSparseKVPool(8 * PAGE_SIZE, PAGE_SIZE, torch.bfloat16, device="cpu", **shape)
    keys = model.index_k_pool.k_buffer
    for number, x in enumerate(keys):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(number)))
    content = torch.stack(keys).view(2, -1, PAGE_SIZE, 1, 32).transpose(0, 1).contiguous()
    host: Any = object.__new__(MHATokenToKOnlyPoolHost)
    vars(host).update(layout="page_first_direct", page_size=PAGE_SIZE, k_buffer=content, dtype=torch.bfloat16)
    host.layer_num = 2
    pools = following(model)
    assert pools.kv is model.main_pool
    assert_equal_pages("indexer", host, pools.side_buffers["indexer"], 3 * PAGE_SIZE, heads=1, dim=32)


def test_side_pools_that_are_not_tried_are_refused() -> None:
    is_scaled = {"kv_cache_dim": 48 + 16 + 4, "index_buf_size": 64}
    scaled = DSATokenToKVPool(64, 64, 48, torch.float8_e4m3fn, 16, 1, "cpu", 128, False, **is_scaled)
    with pytest.raises(UnsupportedError, match="DSATokenToKVPool"):
        following(scaled, 64)
    for other in (ComponentType.SWA, ComponentType.MAMBA, ComponentType.C128):  # which its pages would lack
        message = f"a KV cache of .*{other}.* in the pools MHATokenToKVPool: add --en"
        with pytest.raises(UnsupportedError, match=message):
            following(plain_pool(), PAGE_SIZE, other)
    windows = SWAKVPool(0, 64, PAGE_SIZE, torch.float32, HEADS, DIM, [0, 1], [], "cpu")
    with pytest.raises(UnsupportedError, match="models without a layer of full attention"):
        following(windows, PAGE_SIZE, ComponentType.SWA)


def assert_equal_pages(
    name: str, host: Any, device: SideBuffers, place: int, heads: int = HEADS, dim: int = DIM
) -> None:
    """Servers of both modes take each other's pages."""
    of_host, of_device = SidePools(), EnginePools(None, (), {name: device}).sides
    of_host.add_pool(name, host)
    host.device, host.head_num, host.head_dim, host.pin_memory = "cpu", heads, dim, False
    assert of_device.identity(0, 1, is_mla=False) == of_host.identity(0, 1, is_mla=False)
    assert of_device.page_bytes == of_host.page_bytes
    page = of_host.read(name, place)
    size = device.page_size
    here, there = torch.arange(place, place + size), torch.arange(size)
    assert torch.equal(device.gather(here)[0], page)
    device.scatter(there, page[None])
    assert torch.equal(device.gather(torch.cat([here, there])), torch.stack([page, page]))


# On a GPU


class NoWaits(TorchFunctionMode):
    """Nothing may ask for numbers that are on a GPU, which would wait for it."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        assert name not in {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero"}, name
        return function(*args, **(kwargs or {}))


def test_slots_stay_on_a_gpu(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scheduler's thread does with those that SGLang hands over, it does not wait for them."""
    rig = make(window=WINDOW, gpu=FakeDevice())

    def without_waits(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with NoWaits():
            return call(*args, **kwargs)

    for owner, name in (
        *((rig.linker, name) for name in ("load", "offload", "start_layer_wise_loading")),
        (rig.linker._offloads, "step"),
    ):
        monkeypatch.setattr(owner, name, partial(without_waits, getattr(owner, name)))
    tokens = rig.stored(prompt(0))
    assert rig.fetch(tokens) == 32
    assert rig.holds_window(tokens, WINDOW)


SLOTS, STATE_PAGES = 6, 3


def make_gpu_states() -> SideBuffers:
    """Return the buffers of states that are not aligned with one another, in dtypes of three sizes."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 3, 5), torch.float32), ((7, 3), torch.bfloat16), ((3,), torch.uint8)
    states = [torch.randn((SLOTS, *shape), generator=generator).mul(50).to(dtype) for shape, dtype in shapes]
    return SideBuffers([*states, *(x.clone() for x in states)], 1, torch.bfloat16, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scratch_bytes", [512, 4096])
def test_states_are_restored_beside_values(seed: int, scratch_bytes: int) -> None:
    """The model's layers that have states are complete when these are there, also before the first with K and V."""
    device = FakeDevice(seed)
    pages, states = make_pages(device), make_gpu_states()
    memory = torch.empty(1 << 16, dtype=torch.uint8)
    expected = torch.randint(0, 100, (STATE_PAGES, states.page_bytes), dtype=torch.uint8)
    staged_states = memory[1001:][: 2 * expected.nbytes].view(STATE_PAGES, -1)[:, : states.page_bytes].copy_(expected)
    sides = {("mamba", page): staged_states[page] for page in range(STATE_PAGES)}
    pools = EnginePools(None, [None, 0, None, 1, 2, 3, None], {"mamba": states})
    loader = GpuLoader(pages, pools, scratch_bytes)
    parts = memory[1 << 15 :][: 64 * (48 + 64)].split([64 * 48, 64 * 64])
    values = CellValues(*(x.view(torch.bfloat16).view(4, 4, 2, -1) for x in parts))  # a page, of four layers
    for x in values:
        x.copy_(torch.randn(x.shape))
    slots, ends, seen = torch.tensor([4, 1, 3]), list[bool](), list[torch.Tensor]()
    of_states = [SideSlots("mamba", range(STATE_PAGES), slots)]
    staged = StagedValues(1, 1, memory, values, sides=sides)
    device.forward_pass(lambda: [x.fill_(9) for x in states._rows])  # a request that has ended computes still
    index = loader.begin([Load(staged, slots_of([5]), ends.append, of_states)])
    loader.counter.set_consumer(index)
    loader.counter.wait_until(0)
    device.launch(device.scheduler, lambda: seen.append(states.gather(slots)))  # the model's first layer
    assert loader.finish(index)
    device.run()
    assert ends == [True]
    assert torch.equal(seen[0], expected)
    found = zip(*(pages.layer_buffers(layer) for layer in range(4)), strict=True)
    for buffers, x in zip(found, values, strict=True):
        assert torch.equal(torch.stack([buffer[slots_of([5])] for buffer in buffers]), x)
    loader.close()


@pytest.mark.parametrize("seed", range(8))
def test_states_are_read_after_they_are_computed(seed: int) -> None:
    device, slots = FakeDevice(seed), torch.tensor([4, 1])
    states = make_gpu_states()
    pages = make_pages(device, read_buffer_bytes=states.most_row_bytes)  # several pieces
    device.forward_pass(lambda: [x.fill_(9) for x in states._rows])
    read = pages.open_side_reads(states, slots)
    found = torch.stack([read(page) for page in range(2)])
    device.run()
    assert torch.equal(found, states.gather(slots))
