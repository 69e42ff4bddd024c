"""Runs every kernel in the emulator of PTX, and prints, as JSON, what was wrong with each.

`test_emulated_kernels` starts it without Triton's interpreter, with the newest and the oldest Triton. Shapes are the
smallest with odd sizes, room left, and more than one block or step of a loop. What is expected is what the other tests
expect. Controls are faults that the emulator must see.

KVFETCH_EMULATED_CELLS is the number of cells of `exact` that are tried.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import xxhash

from harness.layer_maps import plain_layers
from harness.ptx.values import Fault
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.triton_kernels import restore_klt as restore_klt_module
from sgl_kvfetch.triton_kernels.xxh3 import MIN_BYTES, digest_of, xxh3_sums
from tests.codec.bitstream.test_ans import coefficients
from tests.codec.quant.profiles import place_of, values_of
from tests.triton_kernels import (
    test_ans_kernel as decoding,
    test_quantise_klt_kernel as quantising,
    test_restore_exact_kernel as restoring_exact,
    test_restore_klt_kernel as restoring_klt,
)
from tests.triton_kernels.cases import NUM_SLOTS
from tests.triton_kernels.emulation import Emulator
from tests.triton_kernels.test_xxh3_kernel import random_bytes

KLT = restoring_klt.Case(33, 1, 1, 80, 48, coefficients=70, exact=(0, 32))


def ans_decode_bits() -> None:
    every = [coefficients(1, 1), coefficients(2, 33), coefficients(1, 70)]
    data, chunks = decoding.joined([decoding.CODEC.encode(x) for x in every], [(len(x), x.shape[3]) for x in every])
    status, found = decoding.decoded(data, chunks)
    assert status == [0] * len(every)
    assert all(torch.equal(x, y.view(-1)) for x, y in zip(found, every, strict=True))


def ans_decode_damaged() -> None:
    frames = coefficients(2, 33)
    bitstream = bytearray(decoding.CODEC.encode(frames))
    bitstream[len(bitstream) // 2] ^= 7
    data, chunks = decoding.joined([bytes(bitstream)], [(len(frames), 33)])
    assert decoding.decoded(data, chunks)[0] == [1]


def ans_tables_decode_bits() -> None:
    restoring_exact.assert_decoded([(1, 24, 8), (130, 48, 32)])


def ans_tables_decode_damaged() -> None:
    coded = restoring_exact.Coded()
    bitstream = bytearray(restoring_exact.AnsTablesCodec().encode(coefficients(33, 8)))
    bitstream[-9] ^= 7
    coded.add(bytes(bitstream), 33, 24, 16)
    assert coded.decoded()[0] == [1]


def restore_exact_bits() -> None:
    """Hostile values of all types."""
    for seed in range(int(os.environ.get("KVFETCH_EMULATED_CELLS", "10"))):
        restoring_exact.assert_restored(restoring_exact.Span(seed))


def xxh3_digests() -> None:
    data, ranges = random_bytes(4096), [(0, MIN_BYTES), (8, 1024), (16, 1089)]
    for (start, size), sums in zip(ranges, xxh3_sums(data, ranges).tolist(), strict=True):
        assert digest_of(sums, size) == xxhash.xxh3_128_digest(data[start : start + size].numpy().data), size


def run_klt(*cases: restoring_klt.Case) -> None:
    for case in cases:
        restoring_klt.run_case(restoring_klt.run_kernels, case)


def restore_klt_slots_anywhere() -> None:
    """Slots of pages of one token begin at any multiple of 8 bytes."""
    span = restoring_klt.Span(replace(KLT, k_dim=48, coefficients=16, exact=(3,)))
    span.slots = torch.cat((span.slots[:1], span.slots))[1:]
    assert span.slots.data_ptr() % 16
    restoring_klt.run_kernels([span.cell()], span.slots, 1)
    span.check()


def restore_klt_options() -> None:
    """Vectors of tokens, and more steps of the loop than are in shared memory."""
    case = replace(KLT, tokens=48, coefficients=200, rotary_dim=80)
    # The second differs from the first in the registers that `ptxas` may use.
    restoring_klt.assert_options_agree(case, restore_klt_module.OPTIONS[2:])


def quantise_klt() -> None:
    """In bfloat16 and fp8, with layers that rotate differently, and in float32 with neighbours that rotate."""
    alike = plain_layers(4, quantising.EVERY)
    kinds = (
        (quantising.MIXED, torch.bfloat16, True),
        (quantising.MIXED, torch.float8_e4m3fn, True),
        (quantising.MIXED, torch.float8_e5m2, False),
        (alike, torch.float32, False),
    )
    for layers, dtype, has_bfloat16 in kinds:
        with patch.object(klt, "_HAS_BFLOAT16", has_bfloat16):
            quantiser = KltQuantiser(quantising.profile_of(layers), step=1.0)
            place = place_of(quantiser.profile, (1, 0), 17)
            values = values_of(quantiser.profile, 17).cell(place.layers, place.heads)
            quantising.assert_as_the_quantiser(quantiser, CellValues(*(x.to(dtype) for x in values)), place)


def slots_beyond_the_buffers(emulator: Emulator) -> None:
    span = restoring_klt.Span(KLT)
    span.slots[5] = NUM_SLOTS
    with emulator.running():
        restoring_klt.run_kernels([span.cell()], span.slots, 1)


def integers_that_are_not_aligned(emulator: Emulator) -> None:
    """As if the wrapper let them pass."""
    span = restoring_klt.Span(replace(KLT, tokens=48))
    flat = span.integers.flatten()
    integers = torch.cat((flat[:4], flat))[4:].view(span.integers.shape)
    assert integers.data_ptr() % 16
    with emulator.running(), patch.object(restore_klt_module, "require", lambda *_: None):
        restoring_klt.run_kernels([span.cell(integers=integers)], span.slots, 1)


def restore_klt_without(emulator: Emulator, instruction: str) -> None:
    kernels = dict(emulator.kernels)
    emulator.kernels |= {key: kernel.without(instruction) for key, kernel in kernels.items()}
    try:
        with emulator.running():
            run_klt(KLT)
    finally:
        emulator.kernels |= kernels


CONTROLS: dict[str, tuple[Callable[[Emulator], None], str]] = {
    "slots beyond the buffers": (slots_beyond_the_buffers, "outside all tensors"),
    "integers that are not aligned": (integers_that_are_not_aligned, "misaligned"),
    "no barriers": (partial(restore_klt_without, instruction="bar.sync"), "barrier"),
    "no waits for copies": (partial(restore_klt_without, instruction="cp.async.wait_group"), "shared memory"),
}
ALL_TURN = replace(KLT, rotary_dim=80, interleaved=True)
CASES: dict[str, Callable[[], None]] = {
    "restore_klt plain": partial(run_klt, KLT),
    "restore_klt rotated": partial(run_klt, replace(KLT, coefficients=330, rotary_dim=40)),
    "restore_klt interleaved": partial(run_klt, replace(ALL_TURN, dtype=torch.float16)),
    "restore_klt fp8": partial(
        run_klt, replace(KLT, rotary_dim=40, dtype=torch.float8_e4m3fn), replace(ALL_TURN, dtype=torch.float8_e5m2)
    ),
} | {
    case.__name__: case
    for case in (
        ans_decode_bits,
        ans_decode_damaged,
        ans_tables_decode_bits,
        ans_tables_decode_damaged,
        restore_exact_bits,
        xxh3_digests,
        restore_klt_slots_anywhere,
        restore_klt_options,
        quantise_klt,
    )
}


def run_all(target: str) -> dict[str, Any]:
    """Return what was wrong with each case, an empty string if nothing was; and what ran."""
    emulator, wrong = Emulator(target), {}
    for name, case in CASES.items():
        wrong[name] = ""
        try:
            with emulator.running():
                case()
        except Exception:
            wrong[name] = traceback.format_exc()
    kernels = sorted({kernel.program.name for kernel in emulator.kernels.values()})
    for name, (control, text) in CONTROLS.items():
        wrong[name] = "not seen"
        try:
            control(emulator)
        except Fault as fault:
            wrong[name] = "" if text in str(fault) else str(fault)
    return {"wrong": wrong, "kernels": kernels}


if __name__ == "__main__":
    torch.set_num_threads(1)
    assert not restore_klt_module.INTERPRETED
    print(json.dumps({target: run_all(target) for target in sys.argv[1:]}))
