"""The memory of a calibration hardly grows with the number of layers."""

import gc
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.models import make_tiny_llama
from sgl_kvfetch.codec.calibrate.fit import CalibrationOptions, calibrate_model
from sgl_kvfetch.codec.calibrate.layer_map import map_layers
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from tests.codec.quant.profiles import CALIBRATION

pytestmark = pytest.mark.slow

CONTEXT, CONTINUATION = 256, 16
_TYPES = torch.Tensor, torch.nn.Parameter


def live_storages() -> dict[int, int]:
    """Return the address and the bytes of all memory that tensors have."""
    tensors = (x for x in gc.get_objects() if type(x) in _TYPES and x.device.type == "cpu")
    storages = (x.untyped_storage() for x in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def peak_and_kept_bytes(folder: Path, num_layers: int) -> tuple[int, int]:
    """Calibrate a model. Return the most bytes that tensors had between two layers, and those of what has to stay: the
    profile, and the held-out context's K and V."""
    path = make_tiny_llama(folder, num_layers=num_layers, hidden_size=64, head_dim=32, vocab_size=64)
    model = LayeredModel(str(path))
    layers, _ = map_layers(model)
    windows = list(torch.randint(3, 64, (2, CONTEXT + CONTINUATION), generator=torch.Generator().manual_seed(0)))
    before = live_storages()
    peak = 0

    def watched(steps: Iterable[Any], total: int, what: str) -> Iterator[Any]:
        nonlocal peak
        for step in steps:
            yield step
            peak = max(peak, sum(size for address, size in live_storages().items() if address not in before))

    options = CalibrationOptions(num_context=CONTEXT, max_channels=3 * 64, tp_size=2)  # three layers of one head a cell
    profile = calibrate_model(model, {"text": windows}, layers, CALIBRATION, options, watched)
    assert profile.grid.num_layer_groups == num_layers // 3
    context_bytes = CONTEXT * num_layers * model.num_heads * 64 * 2
    return peak, sum(x.nbytes for x in profile._tensors().values()) + context_bytes


def test_only_the_profile_and_held_out_values_grow_with_the_layers(tmp_path: Path) -> None:
    """Neither the sums of products that transforms are made from nor the matrices that restore the held-out context
    are kept for all layers."""
    few_peak, few_kept = peak_and_kept_bytes(tmp_path / "few", 3)
    many_peak, many_kept = peak_and_kept_bytes(tmp_path / "many", 12)
    assert many_kept > 3.9 * few_kept
    assert many_peak - few_peak < 1.2 * (many_kept - few_kept)
