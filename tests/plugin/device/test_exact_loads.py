"""Loads of `exact` into a pool on a fake GPU: its cells stay coded, and every bit is what was stored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.plugin.device import gpu_loads
from sgl_kvfetch.protocol.arena import StagedCode
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import fitted_decode_table
from tests.plugin.device import rig as device_rig
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.fake_streams import FakeDevice
from tests.plugin.device.gpu_models import loaded, use_small_model
from tests.plugin.device.rig import Request, Rig, prompt
from tests.reasons import assert_counted

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS, DIM = 5, 32  # the last cell has two layers
TOKENS = prompt(0)
COMMON: dict[str, Any] = {"codec": "ans", "num_layers": LAYERS, "max_tp_size": 1}  # so cells have both heads
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """References stand for the kernel that decodes, except where a test says otherwise."""
    use_small_model(monkeypatch)
    monkeypatch.setattr(device_rig, "LAYERS", LAYERS)
    monkeypatch.setattr(device_rig, "DIM", DIM)
    monkeypatch.setattr(runtime, "INTERPRETED", False)


def written(make: MakeRig, dtype: torch.dtype = torch.bfloat16, **config: Any) -> list[torch.Tensor]:
    """Let a server without a GPU write a prompt, and return what it restores of it."""
    cpu = make(**COMMON, dtype=dtype, **config)
    cpu.stored(TOKENS)
    return loaded(cpu, TOKENS)


def reader(make: MakeRig, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **config: Any) -> Rig:
    return make(**COMMON, dtype=dtype, gpu=FakeDevice(seed), mode="read_only", **config)


def code_of(rig: Rig, request: Request) -> StagedCode | None:
    code: StagedCode | None = rig.linker.prefixes._prefixes[request.rid].state.values.code
    return code


def chunks_of(rig: Rig) -> np.ndarray:
    """Return the chunks of a prompt's cells as they are staged for a request that then leaves."""
    request = rig.arrive_staged(TOKENS)
    code = code_of(rig, request)
    assert code is not None
    rig.linker.prefixes.leave(request.rid)
    rig.hear_plane()
    return code.chunks


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scratch_bytes", [1 << 20, 192 << 10])
def test_coded_cells_are_restored_on_the_gpu(
    scratch_bytes: int, dtype: torch.dtype, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    expected = written(make, dtype)
    rig = reader(make, dtype)
    chunks = chunks_of(rig)
    size = dtype.itemsize
    assert chunks.shape == (2, 2 * size)
    assert chunks["is_coded"][:, size - 1 :: size].all()  # exponents, of K and of V
    decoded: list[int] = []

    def decode(data: torch.Tensor, table: torch.Tensor, *args: Any) -> None:
        decoded.append(len(table))
        fitted_decode_table(data, table, *args)

    monkeypatch.setattr(gpu_loads, "fitted_decode_table", decode)
    assert_same_bits(loaded(rig, TOKENS), expected)
    assert sum(decoded) == chunks["is_coded"].sum()
    rig.assert_nothing_held()


def test_mantissas_lie_as_they_are_stored(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a cell with fewer layers than planes, too: the CPU decodes nothing."""
    written(make)
    monkeypatch.setattr(SegmentReader, "_decode_integers", lambda *args: pytest.fail("decoded by the CPU"))
    chunks = chunks_of(reader(make))
    values = 32 * 3 * 2 * DIM
    assert chunks["is_coded"].tolist() == [[0, 1, 0, 1]] * 2
    assert chunks["size"][:, ::2].tolist() == [[values] * 2, [values // 3 * 2] * 2]
    assert (chunks["size"][:, 1::2] < values // 2 + 600).all()


def test_the_kernels_restore_what_the_cpu_does(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(device_rig, "DIM", 8)
    expected = written(make)
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert_same_bits(loaded(reader(make), TOKENS), expected)


def test_segments_that_no_gpu_decodes_are_staged_as_values(make: MakeRig) -> None:
    make(**COMMON | {"codec": "zstd"}).stored(TOKENS)
    rig = reader(make, torch.float32)
    request = rig.arrive_staged(TOKENS)
    assert code_of(rig, request) is None
    assert rig.admit(request) == [len(TOKENS)]
    assert rig.holds(TOKENS, len(TOKENS))
    rig.assert_nothing_held()


@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_of_which_the_tree_has_a_part_is_restored_from_there_on(seed: int, make: MakeRig) -> None:
    written(make, torch.float32)
    rig = reader(make, torch.float32, seed)
    request = rig.arrive_staged(TOKENS)
    rig.compute(TOKENS[:12])
    assert rig.admit(request) == [20]
    assert rig.holds(TOKENS, 32)
    rig.assert_nothing_held()


def test_cells_that_the_gpu_decodes_wrongly_abort_their_request_and_are_decoded_by_the_cpu_from_then_on(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(make)
    rig = reader(make)

    def decode(*args: Any) -> None:
        fitted_decode_table(*args)
        args[5][0] ^= 1

    monkeypatch.setattr(gpu_loads, "fitted_decode_table", decode)
    request = rig.arrive_staged(TOKENS)
    with assert_counted("load", Reason.CORRUPT):
        rig.admit(request)
    assert request.discard_output_reason is not None
    rig.hear_plane()
    request = rig.arrive_staged(TOKENS)
    assert code_of(rig, request) is None
    rig.linker.prefixes.leave(request.rid)
    rig.hear_plane()
    assert_same_bits(loaded(rig, TOKENS), expected)
    rig.assert_nothing_held()


def test_a_request_that_leaves_while_its_prompt_is_read_leaves_the_region_to_others(make: MakeRig) -> None:
    expected = written(make)
    rig = reader(make)
    rig.store.reads.is_open = False
    request = rig.arrive(TOKENS)
    rig.settle(lambda: rig.store.reads.num_waiting > 0)
    rig.linker.prefixes.leave(request.rid)
    rig.hear_plane()
    rig.store.reads.is_open = True
    rig.assert_nothing_held()
    assert_same_bits(loaded(rig, TOKENS), expected)


def test_what_stays_coded_in_memory_is_checked_once(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lies there: the CPU decodes nothing of it, neither at first nor later."""
    done = Counter[str]()
    verified = SegmentReader.verified_cell

    def count(*args: Any) -> Any:
        done["verified"] += 1
        return verified(*args)

    monkeypatch.setattr(SegmentReader, "verified_cell", count)
    expected = written(make)
    rig = reader(make, memory_cache="1MiB")
    for num_verified in (2, 0, 0):
        done.clear()
        assert_same_bits(loaded(rig, TOKENS), expected)
        assert done["verified"] == num_verified
        rig.evict()
    chunks = chunks_of(rig)
    in_memory = chunks["start"] >= rig.service._prompts.room.num_bytes
    assert in_memory.all()
    rig.assert_nothing_held()


def test_what_is_encrypted_is_decrypted_and_stays_coded(make: MakeRig, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("0f" * 32)
    expected = written(make, key_file=str(key))
    rig = reader(make, key_file=str(key), memory_cache="1MiB")
    for _ in range(2):
        assert_same_bits(loaded(rig, TOKENS), expected)
        rig.evict()
    assert chunks_of(rig)["is_coded"].tolist() == [[0, 1, 0, 1]] * 2
    rig.assert_nothing_held()
