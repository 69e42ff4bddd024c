"""One fetch that runs: where its pages go, and how far it is."""

from __future__ import annotations

from collections.abc import Sequence

from sgl_kvfetch import timeline
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.plane.fetch.plan import PageSource, span_parts
from sgl_kvfetch.plane.fetch.sink import Destination
from sgl_kvfetch.plane.memory_cache import Held


class RunningFetch:
    """Tracks which parts of a fetch are restored. A page counts only if it and all pages before it are whole."""

    def __init__(
        self, sources: Sequence[PageSource], destination: Destination, held: Held, request: timeline.Request
    ) -> None:
        """``held``: the spans whose bytes are in memory. ``request``: for the timeline."""
        self.parts = span_parts(sources)  # in the order of their first pages; several may hold a page, each some heads
        self.destination = destination
        self.held = held
        self.request = request
        self.failures: list[KVFetchError] = []
        self.num_asked = len(sources)
        self.num_transmitting = 0  # units
        self.is_late = False  # the rest would arrive after the deadline
        self._cells_left = [part.reader.cells_per_span for part in self.parts]
        self.num_unasked = sum(self._cells_left)  # cells whose bytes are not requested yet
        # Before the first page of a part, all earlier pages are in the parts before it.
        self._pages_before = [*(part.request_pages[0] for part in self.parts), self.num_asked]
        self._end = len(self.parts)  # the first part that failed or is not wanted
        self._num_whole = 0

    def is_wanted(self, part: int) -> bool:
        return part < self._end

    def restored(self, part: int, num_cells: int) -> None:
        self._cells_left[part] -= num_cells

    def fail(self, part: int, error: KVFetchError | None) -> None:
        """End the fetch before this part. ``error`` is None if the part is not wanted."""
        if error is not None:
            self.failures.append(error)
        self._end = min(self._end, part)

    def advance(self) -> bool:
        """Count the parts that are whole. Return whether every part before the first failure is."""
        while self._num_whole < self._end and not self._cells_left[self._num_whole]:
            self._num_whole += 1
        return self._num_whole == self._end

    def left_bytes(self, sizes: Sequence[int]) -> float:
        """Return how many bytes are not restored yet. ``sizes``: each part's bytes."""
        return sum(
            size * left / part.reader.cells_per_span
            for size, left, part in zip(sizes, self._cells_left, self.parts, strict=True)
        )

    @property
    def share_left(self) -> float:
        """Return the share of the pages that is not part of the restored run yet."""
        return 1 - self.num_pages / self.num_asked

    @property
    def num_pages(self) -> int:
        """Return the length of the restored run, from the first page."""
        return self._pages_before[self._num_whole]
