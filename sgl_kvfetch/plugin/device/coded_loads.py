"""A load of a prompt that the device restores: its tables, and what is launched for each layer group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from sgl_kvfetch.codec import CellPlace, Device, Stream
from sgl_kvfetch.codec.layout import PLANES, RegionLayout
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import StagedCode
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.loads import Load
from sgl_kvfetch.plugin.device.pinned_memory import PinnedMemory, copy
from sgl_kvfetch.triton_kernels.ans import ans_decode_table
from sgl_kvfetch.triton_kernels.restore_klt import KltModel, KltPlaces, klt_rows, launch_klt, region_pixels
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digests_of, xxh3_sums_table

N = TypeVar("N", int, np.ndarray)

_ALIGNMENT = 256  # of frames, in bytes
_ANS_FIELDS, _SUM_FIELDS = 5, 2
_STATUS_BYTES, _SUM_BYTES = 4, 8 * SUMS
_POINTER_BYTES = 16  # of what kernels get pointers to: for others, Triton would compile them again while SGLang serves


class _Part(NamedTuple):
    """Cells that go through scratch memory together, all of them coded or none. ``cells``: a slice of the prompt's.
    ``status``: the range of their statuses. ``code``: bytes of the shared memory. ``frames_at``: where the decoded
    frames begin in scratch memory, behind the code. ``most_area``: the most values of a row of these frames."""

    is_coded: bool
    cells: slice
    status: slice
    code: slice
    frames_at: int
    frames_bytes: int
    most_area: int
    most_tokens: int
    most_exact: int


class CodedLoad:
    """Everything but ``works`` and ``fetch_results`` is done before anything is launched. Keeps the memory that the
    device uses."""

    def __init__(
        self,
        pages: CudaPages,
        device: Device,
        stream: Stream,
        scratch: torch.Tensor,
        load: Load,
        code: StagedCode,
        memory: PinnedMemory,
        slots: torch.Tensor,
    ) -> None:
        """``scratch``: memory of the device that other work on ``stream`` may use before and after. ``memory``: that of
        the prompt. ``slots``: those of the load, on the device. Raises UnsupportedError if a cell does not fit into
        ``scratch``."""
        assert pages.quantiser is not None
        self._pages, self._device, self._stream, self._scratch = pages, device, stream, scratch
        self._quantiser = pages.quantiser
        self._memory = memory
        self._cells = cells = code.cells
        regions = (cells["height"] // cells["token_rows"]) * (cells["width"] // cells["token_cols"])
        num_frames = -(-cells["coefficients"] // (regions * PLANES))
        area = cells["width"] * cells["height"]
        frames_bytes = np.where(cells["is_coded"], _aligned(num_frames * PLANES * area), 0)
        self._parts = _parts(cells, frames_bytes, area, scratch.numel())
        self._sizes = cells["coefficients"] * cells["num_tokens"]
        self._make_tables(code, num_frames, frames_bytes, area)
        # Pages that are in the pool already are left out.
        before = torch.full((load.first_page * pages.geometry.page_size,), -1, dtype=torch.int64, device=slots.device)
        self._slots = torch.cat([before, slots]) if len(before) else slots
        sizes = len(cells), _aligned(self._parts[-1].status.stop)
        self._results, self._on_host = _Results(device, stream, *sizes), _Results(device, None, *sizes)

    def works(self, layer: int) -> Iterator[Callable[[], object]]:
        """Yield what to launch before a layer can be read, if that was not yielded for a layer before."""
        if layer == 0:
            yield partial(copy, self._tables, self._tables_on_host)
            yield self._results.status.zero_
        for part in self._parts:
            if self._cells["first_layer"][part.cells.start] == layer:
                code = self._memory.whole[part.code]
                yield self._memory.copy_of(code, self._scratch[: len(code)])
                yield partial(self._restore, part)

    def fetch_results(self) -> None:
        """Copy to the host what `num_wrong` looks at. Launch this last."""
        copy(self._on_host.memory, self._results.memory)

    def num_wrong(self) -> int:
        """Return how many cells did not decode to what was stored, once all is done."""
        found = digests_of(self._on_host.sums.numpy(), self._sizes)
        status = np.concatenate([self._on_host.status[part.status] for part in self._parts])
        is_wrong = (status != 0) | (found != self._cells["digest"]).any(axis=1)
        return int((is_wrong & (self._cells["is_coded"] != 0)).sum())

    def _restore(self, part: _Part) -> None:
        if part.is_coded:
            data, out = self._scratch[: part.frames_at], self._scratch[part.frames_at :][: part.frames_bytes]
            ans_decode_table(data, self._ans[part.cells], part.most_area, out, self._results.status[part.status])
            xxh3_sums_table(out, self._sums[part.cells], self._results.sums[part.cells])
        rows, size = self._rows[part.cells].flatten(), self._pages.geometry.page_size
        launch_klt(self._shape, self._dtype, self._vector, rows, self._slots, size, part.most_tokens, part.most_exact)

    # Tables

    def _make_tables(
        self, code: StagedCode, num_frames: np.ndarray, frames_bytes: np.ndarray, area: np.ndarray
    ) -> None:
        """Make the tables of all cells, in pinned memory. They follow what the cells have beside their integers."""
        cells, parts = self._cells, self._parts
        out_start = np.concatenate([_before(frames_bytes[part.cells]) for part in parts])
        of_parts = np.repeat(np.arange(len(parts)), [part.cells.stop - part.cells.start for part in parts])
        code_start = cells["start"] - np.array([part.code.start for part in parts])[of_parts]
        decoded_at = np.array([part.frames_at for part in parts])[of_parts] + out_start
        frames = np.where(cells["is_coded"], decoded_at, code_start)
        ans = np.stack([code_start, cells["size"], num_frames, area, out_start], axis=1)
        sums = np.stack([out_start, self._sizes], axis=1)
        models, of_models = self._models()
        places, of_places = self._places()
        self._shape, self._dtype = models[0].shape, models[0].dtype
        self._vector = min(place.vector for place in places)

        packed_bytes = -(-code.packed.numel() // _POINTER_BYTES) * _POINTER_BYTES
        num_bytes = packed_bytes + ans.nbytes + sums.nbytes + len(cells) * self._shape.row_bytes
        self._tables_on_host = self._device.pinned(num_bytes)
        self._tables = self._device.empty((num_bytes,), self._stream)
        addresses = {
            "data": cells["packed"] + self._tables.data_ptr(),
            "frames": frames + self._scratch.data_ptr(),
            "rotations": self._rotations(),
        }
        numbers = {"tokens": "num_tokens", "pages": "num_pages", "exact": "num_exact"}
        fields = addresses | {name: cells[field] for name, field in numbers.items()}
        rows = klt_rows(self._shape, fields | {"places": of_places, "models": of_models}, places, models)
        self._kept = models, places  # their tensors

        host = self._tables_on_host.numpy()
        host[: code.packed.numel()] = code.packed.numpy()
        made, end = [], packed_bytes
        for table in (ans, sums, rows):
            host[end : end + table.nbytes] = np.ascontiguousarray(table, dtype=np.int64).reshape(-1).view(np.uint8)
            made.append(self._tables[end : end + table.nbytes].view(torch.int64).view(table.shape))
            end += table.nbytes
        self._ans, self._sums = made[:2]
        self._rows = made[2].view(torch.uint8)

    def _models(self) -> tuple[list[KltModel], np.ndarray]:
        """Return the models of the cells, and which of them each cell has."""
        names = "first_layer", "num_layers", "first_head", "num_heads", "model_layer", "model_head"
        keys, which = _distinct(self._cells, names)
        models = []
        for layer, num_layers, head, num_heads, model_layer, model_head in keys:
            place = CellPlace(
                range(model_layer, model_layer + num_layers), range(model_head, model_head + num_heads), range(0)
            )
            layers, heads = range(layer, layer + num_layers), range(head, head + num_heads)
            models.append(self._pages.klt_model(self._quantiser, place, layers, heads))
        return models, which

    def _places(self) -> tuple[list[KltPlaces], np.ndarray]:
        names = "width", "height", "token_rows", "token_cols", "coefficients", "num_tokens"
        keys, which = _distinct(self._cells, names)
        places = []
        for width, height, token_rows, token_cols, coefficients, num_tokens in keys:
            layout = RegionLayout(width=width, height=height, token_rows=token_rows, token_cols=token_cols)
            pixels = self._used(self._pages.resident(region_pixels, layout, coefficients))
            places.append(KltPlaces(layout, num_tokens, pixels))
        return places, which

    def _rotations(self) -> np.ndarray:
        """Return the address of the rotations of each cell's span; 0 without any."""
        assert self._quantiser.profile is not None
        rotations = self._quantiser.profile.rotations
        if rotations is None:
            return np.zeros(len(self._cells), dtype=np.int64)
        spans, which = _distinct(self._cells, ("first_token", "num_tokens"))
        self._rotation_tables = [
            self._used(self._pages.rotations_of(rotations, range(first, first + num_tokens)))
            for first, num_tokens in spans
        ]
        addresses = np.array([table.data_ptr() for table in self._rotation_tables], dtype=np.int64)
        return np.take(addresses, which)

    def _used(self, table: torch.Tensor) -> torch.Tensor:
        self._device.used_on(table, self._stream)
        return table


class _Results:
    """What the kernels say of each cell: on the device, or pinned on the host if ``stream`` is None."""

    def __init__(self, device: Device, stream: Stream | None, num_cells: int, num_status: int) -> None:
        sizes = [num_cells * _SUM_BYTES, num_status * _STATUS_BYTES]
        self.memory = device.pinned(sum(sizes)) if stream is None else device.empty((sum(sizes),), stream)
        sums, status = self.memory[: sizes[0]], self.memory[sizes[0] :]
        self.sums, self.status = sums.view(torch.int64).view(num_cells, SUMS), status.view(torch.int32)


def _parts(cells: np.ndarray, frames_bytes: np.ndarray, area: np.ndarray, scratch_bytes: int) -> list[_Part]:
    """Cut the cells into parts of one layer group each that fit into scratch memory with their frames."""
    parts: list[_Part] = []
    first = 0
    is_coded = (cells["is_coded"] != 0).tolist()
    layers, starts, ends = (x.tolist() for x in (cells["first_layer"], cells["start"], cells["start"] + cells["size"]))
    frames = frames_bytes.tolist()
    taken = frames[0] if frames else 0
    for i in range(1, len(cells) + 1):
        fits = i < len(cells) and taken + frames[i] + _aligned(ends[i] - starts[first]) <= scratch_bytes
        if fits and (layers[i], is_coded[i]) == (layers[first], is_coded[first]):
            taken += frames[i]
            continue
        code = slice(starts[first], max(ends[first:i]))
        frames_at = _aligned(code.stop - code.start)
        if frames_at + taken > scratch_bytes:
            raise UnsupportedError(f"{frames_at + taken} bytes of a cell do not fit into {scratch_bytes} of the loader")
        of, num_before = slice(first, i), parts[-1].status.stop if parts else 0
        status = -(-num_before * _STATUS_BYTES // _POINTER_BYTES) * _POINTER_BYTES // _STATUS_BYTES
        parts.append(
            _Part(
                is_coded[first],
                of,
                slice(status, status + i - first),
                code,
                frames_at,
                taken,
                int(area[of].max()),
                int(cells["num_tokens"][of].max()),
                int(cells["num_exact"][of].max()),
            )
        )
        if i < len(cells):
            first, taken = i, frames[i]
    return parts


def _distinct(cells: np.ndarray, names: tuple[str, ...]) -> tuple[list[list[int]], np.ndarray]:
    """Return the distinct values of some fields, and which of them each cell has."""
    keys, which = np.unique(np.stack([cells[name] for name in names], axis=1), axis=0, return_inverse=True)
    return keys.tolist(), which.reshape(-1)


def _before(sizes: np.ndarray) -> np.ndarray:
    """Return the sum of all sizes before each."""
    before: np.ndarray = np.cumsum(sizes) - sizes
    return before


def _aligned(num_bytes: N) -> N:
    """Return the next multiple of ``_ALIGNMENT``, for a number or an array."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
