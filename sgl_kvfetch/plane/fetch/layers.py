"""Which layers of a round are restored."""

from __future__ import annotations

import threading


class LayerProgress:
    """Counts what is restored, layer by layer. Any thread may call its methods."""

    def __init__(self, num_layers: int, num_each: int) -> None:
        """A layer is whole when ``num_each`` were counted: the round's pages times its heads."""
        self._left = [num_each] * num_layers
        self._changed = threading.Condition()
        self._is_over = False

    def add(self, layers: range, number: int) -> None:
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
