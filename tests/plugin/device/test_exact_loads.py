"""Loads of `exact` into a pool on a fake GPU: its cells stay coded, and every bit is what was stored."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.plugin.device import gpu_loads
from sgl_kvfetch.reasons import Reason
from sgl_kvfetch.triton_kernels import runtime
from sgl_kvfetch.triton_kernels.ans import fitted_decode_table
from tests.plugin.device import rig as device_rig
from tests.plugin.device.conftest import MakeRig
from tests.plugin.device.gpu_models import code_of, left, loaded, reader, staged_chunks, use_small_model, written
from tests.plugin.device.rig import prompt
from tests.reasons import assert_counted

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LAYERS, DIM = 5, 32  # the last cell has two layers
TOKENS = prompt(0)
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _small_model(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """References stand for the kernel that decodes, except where a test says otherwise."""
    use_small_model(monkeypatch)
    monkeypatch.setattr(device_rig, "LAYERS", LAYERS)
    monkeypatch.setattr(device_rig, "DIM", DIM)
    monkeypatch.setattr(runtime, "INTERPRETED", False)


def exact(dtype: torch.dtype = torch.bfloat16, **config: Any) -> dict[str, Any]:
    return {"quantiser": None, "num_layers": LAYERS, "max_tp_size": 1, "dtype": dtype} | config  # cells have both heads


def assert_same_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    ("scratch_bytes", "dtype"), [*((1 << 20, dtype) for dtype in DTYPES), (192 << 10, torch.bfloat16)], ids=str
)
def test_coded_cells_are_restored_on_the_gpu(
    scratch_bytes: int, dtype: torch.dtype, make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_loads, "MOST_SCRATCH_BYTES", scratch_bytes)
    expected = written(make, TOKENS, **exact(dtype))
    rig = reader(make, **exact(dtype))
    chunks = staged_chunks(rig, TOKENS)
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


def test_the_kernels_restore_what_the_cpu_does(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter."""
    monkeypatch.setattr(device_rig, "DIM", 8)
    tokens = TOKENS[:16]
    expected = written(make, tokens, **exact())
    monkeypatch.setattr(runtime, "INTERPRETED", True)
    assert_same_bits(loaded(reader(make, **exact()), tokens), expected)


def test_segments_that_no_gpu_decodes_are_staged_as_values(make: MakeRig) -> None:
    written(make, TOKENS, **exact(torch.float32, codec="zstd"))
    rig = reader(make, **exact(torch.float32))
    request = rig.arrive_staged(TOKENS)
    assert code_of(rig, request) is None
    assert rig.admit(request) == [len(TOKENS)]
    assert rig.holds(TOKENS, len(TOKENS))
    rig.assert_nothing_held()


def test_cells_that_the_gpu_decodes_wrongly_abort_their_request_and_are_decoded_by_the_cpu_from_then_on(
    make: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(make, TOKENS, **exact())
    rig = reader(make, **exact())

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
    left(rig, request)
    assert_same_bits(loaded(rig, TOKENS), expected)
    rig.assert_nothing_held()


def test_what_stays_coded_in_memory_is_checked_once(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """And lies there: the CPU decodes nothing of it, neither at first nor later."""
    done = Counter[str]()
    verified = SegmentReader.verified_cell

    def count(*args: Any) -> Any:
        done["verified"] += 1
        return verified(*args)

    monkeypatch.setattr(SegmentReader, "verified_cell", count)
    expected = written(make, TOKENS, **exact())
    rig = reader(make, **exact(memory_cache="1MiB"))
    for num_verified in (2, 0, 0):
        done.clear()
        assert_same_bits(loaded(rig, TOKENS), expected)
        assert done["verified"] == num_verified
        rig.evict()
    chunks = staged_chunks(rig, TOKENS)
    in_memory = chunks["start"] >= rig.service._prompts.room.num_bytes
    assert in_memory.all()
    rig.assert_nothing_held()
