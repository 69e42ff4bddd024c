"""Rounds of a fetch: each round gets its destination as late as possible."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from sgl_kvfetch.plane.fetch.sink import GuardedSink


@dataclass(frozen=True, slots=True)
class Destination:
    """The pool pages that a round is restored to. Only threads that may wait ask for them. The sink is closed when the
    round ends. ``layers`` counts what is restored, if the engine waits for single layers."""

    pool_pages: Sequence[int]
    sink: GuardedSink
    layers: LayerProgress | None = None

    def count(self, layers: range, heads: range, num_pages: int) -> None:
        if self.layers is not None:
            self.layers.count_cell(layers, len(heads) * num_pages)


class Round:
    """A run of a fetch's pages that gets its destination only when its first bytes have arrived.

    So no slots need to be reserved for bytes that are still in flight. Belongs to one event loop. Shield the futures
    when you await them, because others await them too.
    """

    def __init__(self, first_page: int, end_page: int) -> None:
        """The round holds pages ``[first_page, end_page)`` of the fetch."""
        loop = asyncio.get_running_loop()
        self.first_page = first_page
        self.end_page = end_page
        self.wanted: asyncio.Future[bool] = loop.create_future()  # False: the round ended before
        self.destination: asyncio.Future[Destination | None] = loop.create_future()  # None: it gets none
        self.done: asyncio.Future[int] = loop.create_future()  # length of the restored run

    def want(self) -> None:
        """Note that the round's first bytes have arrived."""
        if not self.wanted.done():
            self.wanted.set_result(True)

    def give(self, destination: Destination | None) -> None:
        """Set the destination; None ends the fetch here. A round that has ended closes the destination's sink."""
        if not self.destination.done():
            self.destination.set_result(destination)
        elif destination is not None:
            destination.sink.close()

    def end(self, num_pages: int) -> None:
        """End the round: nothing is written to its pages afterwards. Only the first call has an effect."""
        if self.done.done():
            return
        if not self.wanted.done():
            self.wanted.set_result(False)
        self.give(None)
        if (destination := self.destination.result()) is not None:
            destination.sink.close()
        self.done.set_result(num_pages)


class LayerProgress:
    """Counts what is restored, layer by layer. Any thread may call its methods."""

    def __init__(self, num_layers: int, num_each: int) -> None:
        """A layer is whole when ``num_each`` were counted: the round's pages times its heads."""
        self._left = [num_each] * num_layers
        self._changed = threading.Condition()
        self._is_over = False

    def count_cell(self, layers: range, number: int) -> None:
        with self._changed:
            for layer in layers:
                self._left[layer] -= number
            self._changed.notify_all()

    def end(self) -> None:
        """Note that nothing more comes."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def wait(self, layer: int, timeout_s: float) -> bool:
        """Wait until ``layer`` and all before it are whole, until nothing more comes, or for ``timeout_s``. Return
        whether they are whole."""
        with self._changed:
            self._changed.wait_for(lambda: not any(self._left[: layer + 1]) or self._is_over, timeout_s)
            return not any(self._left[: layer + 1])
