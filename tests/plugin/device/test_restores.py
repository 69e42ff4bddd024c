"""Restores whole cells with the kernels, from frames into a pool, and compares them with the quantiser on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from sgl_kvfetch.codec.container.reader import CellFrames, SegmentReader
from sgl_kvfetch.codec.cuda_streams import Device
from sgl_kvfetch.codec.quant import klt
from sgl_kvfetch.codec.quant.base import CellValues, Quantiser, TransformInverse
from sgl_kvfetch.codec.quant.klt import EXACT, KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.plugin.device.klt_batches import KltLauncher, make_model
from sgl_kvfetch.plugin.device.restores import CellOutputs, restores_of
from sgl_kvfetch.plugin.device.staging import StagingRing
from sgl_kvfetch.triton_kernels.runtime import use_kernels
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile, values_of
from tests.plugin.device.fake_streams import FakeDevice
from tests.segments import make_segment
from tests.triton_kernels.cases import (
    DEVICE,
    Shape,
    assert_nearly_same,
    assert_same_bits,
    make_buffers,
    poisoned,
    scattered_slots,
)

# Cells of three layers, then of one; klt's have half the heads.
GEOMETRY = KVGeometry(num_layers=4, num_heads=4, k_head_dim=16, v_head_dim=24, page_size=4, dtype="bfloat16")
NUM_PAGES, SPAN_PAGES = 15, 8  # two spans, the last shorter
NUM_TOKENS = NUM_PAGES * GEOMETRY.page_size
OUTLIER = 21  # a token that klt must keep exact, beside the sinks at the start of a sequence
POISON = poisoned(1, dtype=torch.bfloat16).item()


NEOX = Rope(inv_freq=(1.0, 0.1, 0.01), attention_scaling=1.25)
GPTJ = Rope(inv_freq=tuple(0.5**i for i in range(8)), interleaved=True)


@pytest.mark.parametrize("name", ["exact", "uint8", "cachegen"])
def test_the_same_bits_as_on_the_cpu(name: str) -> None:
    quantiser = make_quantiser(name)  # type: ignore[arg-type]
    check(make_profile(num_layers=4, head_dim=16, v_head_dim=24), quantiser, 0, assert_same_bits)


@pytest.mark.parametrize(
    ("rope", "first_page"),
    [(None, 0), (NEOX, 0), (NEOX, 300), (GPTJ, 300)],
    ids=["plain", "neox", "neox far", "gptj far"],
)
def test_the_same_values_as_on_the_cpu(rope: Rope | None, first_page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values may differ in the last bits of sums. Tokens that are kept exact keep all their bits."""
    for product in ("_HAS_BFLOAT16", "_HAS_INTEGERS"):
        monkeypatch.setattr(klt, product, False)  # these products round more than one in float32
    profile = make_profile(num_layers=4, head_dim=16, v_head_dim=24, cell_heads=2, rope=rope, num_sinks=2)
    quantiser = KltQuantiser(profile, step=0.05)
    assert quantiser.coefficient_shares[1] > 0.2  # so many need two integers
    check(profile, quantiser, first_page, assert_nearly_same)


def check(
    profile: Profile, quantiser: Quantiser, first_page: int, compare: Callable[[torch.Tensor, torch.Tensor], None]
) -> None:
    """Restore some pages of each cell into unordered slots, and check that nothing else changes."""
    values = CellValues(*(x.to(torch.bfloat16) for x in values_of(profile, NUM_TOKENS, first_page * 4)))
    values.v[OUTLIER] *= 1e6
    tokens = torch.arange(NUM_TOKENS)
    all_slots = torch.where(tokens // 4 % 5 == 3, -1, scattered_slots(NUM_TOKENS).cpu())
    all_exact = (tokens == OUTLIER) | (tokens < (2 if first_page == 0 else 0))
    shapes = set()
    for cell, expected in decoded_cells(quantiser, values, first_page):
        begin = cell.place.tokens.start - first_page * 4
        span = slice(begin, begin + len(cell.place.tokens))
        slots, exact = all_slots[span], all_exact[span]
        pool = [make_buffers(Shape(NUM_TOKENS, 4, 4, dim), torch.bfloat16) for dim in (16, 24)]
        outputs = [[x[:, cell.heads.start : cell.heads.stop] for x in buffers] for buffers in pool]
        k, v = (x[cell.layers.start : cell.layers.stop] for x in outputs)
        restore(cell, slots, (k, v))
        wanted = slots >= 0
        for heads_of_layers, want in zip(outputs, expected, strict=True):
            for index, layer in enumerate(cell.layers):
                found = heads_of_layers[layer].cpu()[slots[wanted]]
                compare(found, want[wanted, index])
                if isinstance(quantiser, KltQuantiser):
                    assert torch.equal(cell.parts[0] == EXACT, exact)
                    assert_same_bits(found[exact[wanted]], want[wanted & exact, index])
                heads_of_layers[layer][slots[wanted].to(DEVICE)] = POISON
        for buffers in pool:
            for buffer in buffers:
                assert_same_bits(buffer, poisoned(*buffer.shape, dtype=torch.bfloat16))
        shapes.add((len(cell.layers), len(cell.place.tokens)))
    assert shapes == {(3, 32), (1, 32), (3, 28), (1, 28)}


def decoded_cells(quantiser: Quantiser, values: CellValues, first_page: int) -> Iterator[tuple[CellFrames, CellValues]]:
    """Return the cells of a segment and their dequantised values."""
    coded, _ = make_segment(
        GEOMETRY,
        NUM_PAGES,
        quantiser=quantiser,
        first_page=first_page,
        span_pages=SPAN_PAGES,
        values={"k": values.k, "v": values.v},
    )
    reader = SegmentReader(coded.manifest, quantiser)
    for cell in coded.manifest.cells():
        data = coded.data[slice(*reader.cell_range(cell))]
        yield reader.decode_frames(cell, data), reader.dequantise_cell(cell, reader.decode_cell(cell, data))


def restore(cell: CellFrames, slots: torch.Tensor, outputs: CellOutputs) -> None:
    assert use_kernels(DEVICE)
    inverse = cell.quantiser.inverse_of(cell.place)
    if isinstance(inverse, TransformInverse):
        restore_batch(cell, inverse.to(DEVICE), slots, outputs)
        return
    for work in restores_of(cell, inverse, outputs):
        fixed = [x.to(DEVICE) for x in work.fixed]
        work.launch(slots.to(DEVICE), fixed, [cell.parts[i].to(DEVICE) for i in work.parts], 0)


def restore_batch(cell: CellFrames, inverse: TransformInverse, slots: torch.Tensor, outputs: CellOutputs) -> None:
    device = Device(DEVICE) if DEVICE.type == "cuda" else FakeDevice()

    def resident(table: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
        return table(*args).to(DEVICE)

    stream = device.new_stream()
    batches = KltLauncher(device, StagingRing(device, 4 << 20), 4, lambda kind, trial: trial())
    opened = batches.open(stream, slots.to(DEVICE), partial(device.launch, stream), resident)
    pages = range(len(slots) // 4)
    assert isinstance(cell.quantiser, KltQuantiser)
    launched = opened.restore(cell, make_model(cell.quantiser, inverse, *outputs, resident), pages, pages, run_always)
    is_finished = launched.result(60)
    device.mark(stream).synchronize()
    assert is_finished()


def run_always(write: Callable[[], None]) -> bool:
    write()
    return True
