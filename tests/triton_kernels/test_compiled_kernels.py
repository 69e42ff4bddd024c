"""The kernels as machine code for one card, and the package without Triton. Each in a process of its own: this one
interprets. `test_other_cards.py` has the other cards, and the oldest Triton.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.triton_kernels.tritons import run_python

pytestmark = pytest.mark.process

FLOATS = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
TARGET = "sm_90"
TENSOR_CORES = {"sm_90": "wgmma.mma_async m64 k16", "sm_100": "tcgen05.mma"}
MOST_REGISTERS = {
    "ans_decode": 80,
    "ans_decode fitted": 80,
    "xxh3": 96,
}  # with 64, 32 programs of one warp fit an SM; with 80, 25; with 96, 21
KLT_KERNELS = [
    *(f"restore_klt {which} {dtype} 2x128" for which in ("rotated", "interleaved") for dtype in FLOATS),
    *(f"restore_klt {which}bfloat16 {shape}" for which in ("", "rotated ") for shape in ("3x64", "2x80", "2x256")),
    *(f"restore_klt rotated {dtype} 2x128" for dtype in FP8),
    "restore_klt bfloat16 2x128",
    "restore_klt mixed bfloat16 2x128",
]
QUANTISING_KERNELS = [*(f"centre rotated {dtype} 2x128" for dtype in (*FLOATS, *FP8)), "centre bfloat16 2x128", "round"]
EXACT_KERNELS = [
    *(f"restore_exact {dtype} 2x128" for dtype in (*FLOATS, FP8[0])),
    *(f"restore_exact bfloat16 {shape}" for shape in ("2x80", "1x64+512")),
    "decoding_tables",
]

Facts = dict[tuple[str, str], dict[str, Any]]


@pytest.fixture(scope="module")
def compiled() -> Facts:
    return facts_of(TARGET)


def facts_of(*targets: str, triton: Path | None = None) -> Facts:
    lines = run_python("-m", "benchmarks.compiled_kernels", "--targets", *targets, triton=triton).splitlines()
    return {(x["kernel"], x["target"]): x for x in map(json.loads, lines)}


@pytest.mark.parametrize("kernel", [*KLT_KERNELS, *QUANTISING_KERNELS, *EXACT_KERNELS, *MOST_REGISTERS])
def test_compiles(kernel: str, compiled: Facts) -> None:
    check(kernel, compiled[kernel, TARGET], TARGET)


def check(kernel: str, facts: dict[str, Any], target: str) -> None:
    """Whether registers suffice, so that several programs fit an SM, and memory is read in wide accesses."""
    is_amd = target == "gfx942"  # whose units have twice as many registers
    if kernel in KLT_KERNELS:  # with 128 registers a thread, two programs fit an SM; with more, one
        assert facts["stack_bytes"] <= (128 if is_amd else 8), "registers spill"
        assert facts["registers"] <= (512 if is_amd else 255)
        assert facts["shared_bytes"] <= 99 << 10
        assert facts["access_bytes"] >= (8 if is_amd else 16)
        assert not is_amd or facts["loop"] is None
        if target in TENSOR_CORES:
            # Integers are converted once for all channels of a tile: about as many instructions as tensor cores take.
            assert facts["instructions"] == [TENSOR_CORES[target]]
            assert facts["loop"][0] <= 340
        return
    assert facts["stack_bytes"] == 0, "registers spill"
    if kernel in MOST_REGISTERS:
        assert facts["registers"] <= MOST_REGISTERS[kernel]
        assert facts["shared_bytes"] <= 1024
    elif kernel in QUANTISING_KERNELS:  # with 80 registers a thread six programs fit an SM, with 168 three
        assert facts["registers"] <= (168 if kernel == "round" else 80)
        assert facts["access_bytes"] == (1 if kernel == "round" else 16)
    else:
        assert facts["registers"] <= 80
        assert facts["shared_bytes"] <= 8 << 10
        assert facts["access_bytes"] >= (8 if is_amd else 16)


def test_every_variant_is_named_here(compiled: Facts) -> None:
    exact = {f"exact_tokens {dtype} 2x128" for dtype in (*FLOATS, FP8[0])}
    named = {*KLT_KERNELS, *QUANTISING_KERNELS, *EXACT_KERNELS, *MOST_REGISTERS}
    assert {kernel for kernel, _ in compiled} == named | exact


def test_references_need_no_triton() -> None:
    run_python(
        "-c",
        """
import sys
sys.modules["triton"] = None
import torch
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.codec.bitstream.ans import AnsCodec
from sgl_kvfetch.triton_kernels.ans import AnsChunk, ans_decode
from sgl_kvfetch.triton_kernels.quantise_klt import KltCells, KltInput
from sgl_kvfetch.codec import pack
from sgl_kvfetch.triton_kernels.restore_klt import KltCell, KltModel, klt_shape, restore_klt
from sgl_kvfetch.triton_kernels.xxh3 import xxh3_sums

output, slots = torch.zeros(9, 2, 64), torch.arange(9)
packed, _ = pack(torch.full((9,), 128, dtype=torch.uint8).numpy(), torch.empty(0, dtype=torch.uint8).numpy())
data = torch.frombuffer(bytearray(bytes(4) + packed), dtype=torch.uint8)
model = KltModel(
    klt_shape(output, output, 1),
    torch.ones((5, 256), dtype=torch.bfloat16),
    torch.full((256,), 3.0),
    torch.zeros(256),
    [output],
    [output],
    [0],
)
integers = torch.zeros((5, 9), dtype=torch.uint8)
restore_klt([KltCell(model, integers, None, 1, 0, data, 0)], data, slots, 9)
assert bool((output == 3.0).all())
rows = torch.full((1, 3, 1, 96), 128, dtype=torch.uint8)
bitstream = AnsCodec().encode(rows)
data = torch.frombuffer(bytearray(bitstream) + bytes(-len(bitstream) % 4), dtype=torch.uint8)
decoded = torch.zeros(288, dtype=torch.uint8)
assert ans_decode(data, [AnsChunk(0, len(bitstream), 1, 96, 0)], decoded).tolist() == [0]
assert torch.equal(decoded, rows.flatten())
assert xxh3_sums(decoded, [(0, 288)]).shape == (1, 8)
elsewhere = [output.to("meta")]
calls = (
    lambda: xxh3_sums(decoded.to("meta"), [(0, 288)]),
    lambda: KltCells([KltInput(None, elsewhere, elsewhere)], None),
)
for call in calls:
    try:
        call()
    except UnsupportedError as e:
        assert "triton" in str(e)
    else:
        raise AssertionError("no error")
""",
    )
