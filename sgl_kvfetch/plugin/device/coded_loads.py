"""A load of a prompt that the device restores: its parts, and the tables of each.

A part is cells that go through scratch memory together: a layer group, or several of a short prompt, or what of one
fits. Its tables are made when its turn comes, so the first part is launched before those of the others are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch

from sgl_kvfetch.codec import CellPlace, Device, Stream
from sgl_kvfetch.codec.layout import PLANES
from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plane import CODE_ALIGNMENT, StagedCode
from sgl_kvfetch.plugin.device.cuda_pages import CudaPages
from sgl_kvfetch.plugin.device.pinned_memory import PinnedMemory, copy
from sgl_kvfetch.triton_kernels.ans import ans_decode_table
from sgl_kvfetch.triton_kernels.restore_klt import KltModel, klt_rows, launch_klt, vector_of
from sgl_kvfetch.triton_kernels.xxh3 import SUMS, digests_of, xxh3_sums_table

N = TypeVar("N", int, np.ndarray)
V = TypeVar("V")

ALIGNMENT = 256  # of scratch memory, and of frames in it, in bytes
_ANS_FIELDS, _SUM_FIELDS, _TABLES = 5, 2, 3
_STATUS_BYTES, _SUM_BYTES = 4, 8 * SUMS
_POINTER_BYTES = 16  # of what kernels get pointers to: for others, Triton would compile them again while SGLang serves

_OF_MODELS = "first_layer", "num_layers", "first_head", "num_heads", "model_layer", "model_head"
_OF_ROTATIONS = "first_token", "num_tokens"

Work = Callable[[], object]  # launches something on the current stream


class Works(NamedTuple):
    """What to launch for a part. ``copies`` fill its scratch memory, ``restores`` read it and write slots. ``checks``
    read it, too, and nothing waits for them but what uses the scratch memory next."""

    copies: Sequence[Work]
    restores: Sequence[Work]
    checks: Sequence[Work] = ()


class _Part(NamedTuple):
    """``cells``: a slice of the prompt's, all of them coded or none. ``status``: the range of their statuses.
    ``frames_at``: where the decoded frames begin in scratch memory, behind the code."""

    layer: int
    is_coded: bool
    cells: slice
    status: slice
    frames_at: int
    frames_bytes: int


class CodedLoad:
    """Keeps the memory that the device uses."""

    def __init__(
        self,
        pages: CudaPages,
        device: Device,
        stream: Stream,
        scratch_bytes: int,
        code: StagedCode,
        memory: PinnedMemory,
        slots: torch.Tensor,
    ) -> None:
        """``stream``: of copies. ``scratch_bytes``: of a part, a multiple of `ALIGNMENT`. ``memory``: that of the
        prompt. ``slots``: those of all its pages, on the device; -1 for pages that are in the pool already. Raises
        UnsupportedError if a cell does not fit into the scratch memory."""
        assert pages.quantiser is not None
        self._pages, self._quantiser = pages, pages.quantiser
        self._memory, self._slots = memory, slots
        self._cells = cells = code.cells
        self._num_frames = -(-cells["coefficients"] // PLANES)
        frames_bytes = _rounded(self._num_frames * PLANES * cells["num_tokens"], ALIGNMENT)
        self._frames_bytes = np.where(cells["is_coded"], frames_bytes, 0)
        self._sizes = cells["coefficients"] * cells["num_tokens"]
        self._parts = list(_parts(cells, self._frames_bytes, scratch_bytes))
        sizes = len(cells), _rounded(self._parts[-1].status.stop, _POINTER_BYTES)
        self._results, self._on_host = _Results(device, stream, *sizes), _Results(device, None, *sizes)
        self._packed_on_host = code.packed
        self._packed = device.empty((code.packed.numel(),), stream)
        self._models, self._rotations = _Made(self._model), _Made(self._rotation)
        self._models.of(cells[:1], _OF_MODELS)
        (first,) = self._models.found
        self._shape, self._dtype = first.shape, first.dtype
        row_bytes = 8 * (_ANS_FIELDS + _SUM_FIELDS) + self._shape.row_bytes
        num_bytes = row_bytes * len(cells) + _TABLES * _POINTER_BYTES * len(self._parts)
        self._tables_on_host, self._tables = device.pinned(num_bytes), device.empty((num_bytes,), stream)
        self._tables_end = 0

    def begin(self) -> list[Work]:
        """Return what to launch on the stream of copies before any part."""
        return [self._memory.copy_of(self._packed_on_host, self._packed), self._results.status.zero_]

    def parts(self, layer: int) -> Iterator[Callable[[torch.Tensor], Works]]:
        """Yield the parts without which a layer cannot be read, if they were not yielded for a layer before. A part is
        a function of its scratch memory."""
        return (partial(self._works, part) for part in self._parts if part.layer == layer)

    def fetch_results(self) -> None:
        """Copy to the host what `num_wrong` looks at. Launch this last."""
        copy(self._on_host.memory, self._results.memory)

    def num_wrong(self) -> int:
        """Return how many cells did not decode to what was stored, once all is done."""
        found = digests_of(self._on_host.sums.numpy(), self._sizes)
        status = np.concatenate([self._on_host.status[part.status] for part in self._parts])
        is_wrong = (status != 0) | (found != self._cells["digest"]).any(axis=1)
        return int((is_wrong & (self._cells["is_coded"] != 0)).sum())

    # Parts

    def _works(self, part: _Part, scratch: torch.Tensor) -> Works:
        of, cells = part.cells, self._cells[part.cells]
        runs, code_start, tokens = *_runs(cells), cells["num_tokens"]
        out_start = np.cumsum(self._frames_bytes[of]) - self._frames_bytes[of]
        integers = (part.frames_at + out_start if part.is_coded else code_start) + scratch.data_ptr()
        tables = [
            np.stack([code_start, cells["size"], self._num_frames[of], tokens, out_start], axis=1),
            np.stack([out_start, self._sizes[of]], axis=1),
            self._klt_rows(cells, integers),
        ]
        copy_tables, (ans, sums, klt) = self._uploaded(tables)
        copies: list[Work] = [copy_tables]
        for here, there in runs:
            copies.append(self._memory.copy_of(self._memory.whole[here], scratch[there]))
        kind = self._shape, self._dtype, min(map(vector_of, np.unique(tokens).tolist())), self._pages.klt_options
        most = int(tokens.max()), int(cells["num_exact"].max())
        rows = klt.view(-1).view(torch.uint8)
        restore = partial(launch_klt, *kind, rows, self._slots, self._pages.geometry.page_size, *most)
        if not part.is_coded:
            return Works(copies, [restore])
        data, out = scratch[: part.frames_at], scratch[part.frames_at :][: part.frames_bytes]
        decode = partial(ans_decode_table, data, ans, most[0], out, self._results.status[part.status])
        check = partial(xxh3_sums_table, out, sums, self._results.sums[of])
        return Works(copies, [decode, restore], [check])

    def _klt_rows(self, cells: np.ndarray, integers: np.ndarray) -> np.ndarray:
        fields = {
            "data": cells["packed"] + self._packed.data_ptr(),
            "integers": integers,
            "rotations": self._rotation_addresses(cells),
            "tokens": cells["num_tokens"],
            "pages": cells["num_pages"],
            "exact": cells["num_exact"],
            "models": self._models.of(cells, _OF_MODELS),
        }
        rows: np.ndarray = klt_rows(self._shape, fields, self._models.found)
        return rows

    def _uploaded(self, tables: list[np.ndarray]) -> tuple[Work, list[torch.Tensor]]:
        """Put int64 tables into pinned memory. Return their copy to the device, and the tables there."""
        begin, made = self._tables_end, []
        for table in tables:
            here = slice(self._tables_end, self._tables_end + table.nbytes)
            self._tables_on_host[here].view(torch.int64).numpy()[:] = table.reshape(-1)
            made.append(self._tables[here].view(torch.int64).view(table.shape))
            self._tables_end = _rounded(here.stop, _POINTER_BYTES)
        all_of = slice(begin, self._tables_end)
        return partial(copy, self._tables[all_of], self._tables_on_host[all_of]), made

    # What cells have in common

    def _model(
        self, layer: int, num_layers: int, head: int, num_heads: int, model_layer: int, model_head: int
    ) -> KltModel:
        place = CellPlace(
            range(model_layer, model_layer + num_layers), range(model_head, model_head + num_heads), range(0)
        )
        layers, heads = range(layer, layer + num_layers), range(head, head + num_heads)
        return self._pages.klt_model(self._quantiser, place, layers, heads)

    def _rotation(self, first_token: int, num_tokens: int) -> torch.Tensor:
        assert self._quantiser.profile is not None
        rotations = self._quantiser.profile.rotations
        assert rotations is not None
        return self._pages.rotations_of(rotations, range(first_token, first_token + num_tokens))

    def _rotation_addresses(self, cells: np.ndarray) -> np.ndarray:
        """Return the address of the rotations of each cell's span; 0 without any."""
        assert self._quantiser.profile is not None
        if self._quantiser.profile.rotations is None:
            return np.zeros(len(cells), dtype=np.int64)
        which = self._rotations.of(cells, _OF_ROTATIONS)
        return np.take(np.array([table.data_ptr() for table in self._rotations.found], dtype=np.int64), which)


class _Made(Generic[V]):
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


class _Results:
    """What the kernels say of each cell: on the device, or pinned on the host if ``stream`` is None."""

    def __init__(self, device: Device, stream: Stream | None, num_cells: int, num_status: int) -> None:
        sizes = [num_cells * _SUM_BYTES, num_status * _STATUS_BYTES]
        self.memory = device.pinned(sum(sizes)) if stream is None else device.empty((sum(sizes),), stream)
        sums, status = self.memory[: sizes[0]], self.memory[sizes[0] :]
        self.sums, self.status = sums.view(torch.int64).view(num_cells, SUMS), status.view(torch.int32)


def _parts(cells: np.ndarray, frames_bytes: np.ndarray, scratch_bytes: int) -> Iterator[_Part]:
    """Cut the cells into parts that fit into scratch memory with their frames.

    A layer group that fits is not cut. The first part has one, each later one up to twice as many as the one before:
    few launches for a short prompt, whose first layers do not wait for the others.
    """
    used = np.concatenate([[0], np.cumsum(frames_bytes)])  # bytes of frames, before each cell
    code = np.concatenate([[0], np.cumsum(_rounded(cells["size"], CODE_ALIGNMENT))])
    needed = used[1:] + code[1:]
    is_coded, layers = cells["is_coded"] != 0, cells["first_layer"]
    of_kinds = np.append(np.flatnonzero(is_coded[1:] != is_coded[:-1]) + 1, len(cells))
    is_next = (layers[1:] != layers[:-1]) | (is_coded[1:] != is_coded[:-1])
    groups = np.append(np.flatnonzero(is_next) + 1, len(cells))  # where layer groups end
    first, most_groups, num_status = 0, 1, 0
    while first < len(cells):
        group = int(np.searchsorted(groups, first, "right"))
        kind_end = of_kinds[np.searchsorted(of_kinds, first, "right")]
        end = int(np.searchsorted(needed, scratch_bytes + used[first] + code[first], "right"))  # of what fits
        whole = int(np.searchsorted(groups, end, "right"))  # groups that end there
        last = groups[min(whole - 1, group + most_groups - 1)] if whole > group else min(end, groups[group])
        end = int(min(last, kind_end))
        frames = int(used[max(end, first + 1)] - used[first])
        frames_at = _rounded(int(code[max(end, first + 1)] - code[first]), ALIGNMENT)
        if end == first:
            raise UnsupportedError(f"{frames_at + frames} bytes of a cell do not fit into {scratch_bytes} of a part")
        status = slice(num_status, num_status + end - first)
        num_status = _rounded(status.stop * _STATUS_BYTES, _POINTER_BYTES) // _STATUS_BYTES
        yield _Part(int(layers[first]), bool(is_coded[first]), slice(first, end), status, frames_at, frames)
        first, most_groups = end, 2 * most_groups


def _runs(cells: np.ndarray) -> tuple[list[tuple[slice, slice]], np.ndarray]:
    """Return the fewest copies that bring a part's code to scratch memory, and where each cell's code then begins.

    A copy is a slice of shared memory, and one of scratch memory. A part's cells lie together in a region; those that
    are held in memory lie together span by span.
    """
    order = np.argsort(cells["start"], kind="stable")
    starts, sizes = cells["start"][order], cells["size"][order]
    rooms = _rounded(sizes, CODE_ALIGNMENT)
    places = np.cumsum(rooms) - rooms
    first = np.concatenate([[0], np.flatnonzero(starts[1:] != (starts + rooms)[:-1]) + 1])
    last = np.append(first[1:], len(cells)) - 1
    ends, code_start = (starts + sizes)[last], np.empty_like(places)
    code_start[order] = places
    found = zip(*(x.tolist() for x in (starts[first], ends, places[first])), strict=True)
    return [(slice(begin, end), slice(at, at + end - begin)) for begin, end, at in found], code_start


def _rounded(num_bytes: N, unit: int) -> N:
    """Return the next multiple of ``unit``, for a number or an array."""
    return -(-num_bytes // unit) * unit
