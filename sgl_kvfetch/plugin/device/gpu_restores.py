"""What a load launches to restore cells whose integers are on the GPU: for `klt` and for `exact`, in one form. The
loader knows neither."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from sgl_kvfetch.codec import CellPlace, Quantiser
from sgl_kvfetch.plugin.device.gpu_pages import CudaPages
from sgl_kvfetch.triton_kernels.restore_exact import exact_rows, launch_exact, outputs_of
from sgl_kvfetch.triton_kernels.restore_klt import KltModel, klt_rows, launch_klt, vector_of

V = TypeVar("V")
_OF_PLACES = "first_layer", "num_layers", "first_head", "num_heads"
_OF_MODELS = *_OF_PLACES, "model_layer", "model_head"
_OF_ROTATIONS = "first_token", "num_tokens"


class Addresses(NamedTuple):
    """Of cells, on the device: int64 ``(cells, chunks)`` of their integers; ``(cells,)`` of what they have beside them,
    and of their page tables."""

    integers: np.ndarray
    packed: np.ndarray
    pages: np.ndarray


class Restores(ABC):
    """Restores cells of one prompt. ``row_bytes``: of a cell's row in the table of a launch."""

    row_bytes: int

    @abstractmethod
    def rows(self, cells: np.ndarray, at: Addresses) -> np.ndarray:
        """Return the rows of some cells, int64 ``(cells, row_bytes / 8)``."""

    @abstractmethod
    def launch(self, cells: np.ndarray, rows: torch.Tensor, slots: torch.Tensor) -> Callable[[], object]:
        """Return what launches their restore. ``rows``: theirs, on the device. ``slots``: of the prompt's pages."""


def restores_of(pages: CudaPages, quantiser: Quantiser, cells: np.ndarray) -> Restores:
    """``cells``: of the prompt."""
    return ExactRestores(pages) if quantiser.is_lossless else KltRestores(pages, quantiser, cells)


class ExactRestores(Restores):
    def __init__(self, pages: CudaPages) -> None:
        self._pages, self._shape = pages, pages.exact_shape
        self.row_bytes = self._shape.row_bytes
        self._outputs = Made(self._outputs_of)

    def _outputs_of(self, layer: int, num_layers: int, head: int, num_heads: int) -> bytes:
        buffers = self._pages.outputs(range(layer, layer + num_layers), range(head, head + num_heads))
        found: bytes = outputs_of(self._shape, *buffers)
        return found

    def rows(self, cells: np.ndarray, at: Addresses) -> np.ndarray:
        outputs = self._outputs.of(cells, _OF_PLACES)
        fields = {"tokens": cells["num_tokens"], "pages": at.pages, "planes": at.integers, "outputs": outputs}
        rows: np.ndarray = exact_rows(self._shape, fields, self._outputs.found)
        return rows

    def launch(self, cells: np.ndarray, rows: torch.Tensor, slots: torch.Tensor) -> Callable[[], object]:
        most = int(cells["num_tokens"].max()), int(cells["num_heads"].max())
        return partial(launch_exact, self._shape, rows, slots, self._pages.geometry.page_size, *most)


class KltRestores(Restores):
    def __init__(self, pages: CudaPages, quantiser: Quantiser, cells: np.ndarray) -> None:
        assert quantiser.profile is not None
        self._pages, self._quantiser, self._turns = pages, quantiser, quantiser.profile.rotations
        self._models, self._rotations = Made(self._model), Made(self._rotation)
        self._models.of(cells[:1], _OF_MODELS)
        (first,) = self._models.found
        self._shape, self._dtype = first.shape, first.dtype
        self.row_bytes = self._shape.row_bytes

    def rows(self, cells: np.ndarray, at: Addresses) -> np.ndarray:
        fields = {
            "data": at.packed,
            "integers": at.integers[:, 0],
            "rotations": self._rotation_addresses(cells),
            "tokens": cells["num_tokens"],
            "pages": at.pages,
            "exact": cells["num_exact"],
            "models": self._models.of(cells, _OF_MODELS),
        }
        rows: np.ndarray = klt_rows(self._shape, fields, self._models.found)
        return rows

    def launch(self, cells: np.ndarray, rows: torch.Tensor, slots: torch.Tensor) -> Callable[[], object]:
        tokens, pages = cells["num_tokens"], self._pages
        kind = self._shape, self._dtype, min(map(vector_of, np.unique(tokens).tolist())), pages.klt_options
        most = int(tokens.max()), int(cells["num_exact"].max())
        table = rows.view(-1).view(torch.uint8)
        return partial(launch_klt, *kind, table, slots, pages.geometry.page_size, *most)

    def _model(
        self, layer: int, num_layers: int, head: int, num_heads: int, model_layer: int, model_head: int
    ) -> KltModel:
        place = CellPlace(
            range(model_layer, model_layer + num_layers), range(model_head, model_head + num_heads), range(0)
        )
        layers, heads = range(layer, layer + num_layers), range(head, head + num_heads)
        return self._pages.klt_model(self._quantiser, place, layers, heads)

    def _rotation(self, first_token: int, num_tokens: int) -> torch.Tensor:
        assert self._turns is not None
        return self._pages.rotations_of(self._turns, range(first_token, first_token + num_tokens))

    def _rotation_addresses(self, cells: np.ndarray) -> np.ndarray:
        """Return the address of the rotations of each cell's span; 0 without any."""
        if self._turns is None:
            return np.zeros(len(cells), dtype=np.int64)
        which = self._rotations.of(cells, _OF_ROTATIONS)
        return np.take(np.array([table.data_ptr() for table in self._rotations.found], dtype=np.int64), which)


class Made(Generic[V]):
    """What several cells share, made once: ``make`` gets a cell's values of some fields. ``found``: all of it."""

    def __init__(self, make: Callable[..., V]) -> None:
        self._make = make
        self._numbers: dict[bytes, int] = {}
        self.found: list[V] = []

    def of(self, cells: np.ndarray, names: Sequence[str]) -> np.ndarray:
        """Return where in ``found`` is what each cell has."""
        values = np.stack([cells[name] for name in names], axis=1)
        raw, size = values.tobytes(), values.itemsize * len(names)
        keys = [raw[begin : begin + size] for begin in range(0, len(raw), size)]
        for key in dict.fromkeys(keys):
            if key not in self._numbers:
                self.found.append(self._make(*np.frombuffer(key, dtype=np.int64).tolist()))
                self._numbers[key] = len(self._numbers)
        return np.array([self._numbers[key] for key in keys])
