"""Copies staged values into SGLang's pool, layer by layer, while the batch that needs them already computes.

`Loader` is what the linker needs. `gpu_loads` has the one for GPUs.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.openmp import use_one_thread
from sgl_kvfetch.plane import StagedValues
from sgl_kvfetch.plugin.device.pages import DevicePages

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Pages of a staged prompt, from ``first_page`` on, and the slots that get them, one per token. ``on_end`` is
    called when they are not read any more, with whether they were sound."""

    staged: StagedValues
    first_page: int
    slots: torch.Tensor
    on_end: Callable[[bool], None]


class Loader(ABC):
    """Loads a batch's prefixes into the pool. ``counter``: SGLang's ``LayerWiseLoadCounter``, which the forward pass
    waits on."""

    counter: Any

    @abstractmethod
    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        """Get the shared memory of a data plane ready. ``cache_bytes``: at its end, in which prompts are kept. Never
        waits."""

    @abstractmethod
    def prepare(self, staged: StagedValues) -> None:
        """Get what was staged ready for its load. Never waits."""

    @abstractmethod
    def begin(self, loads: Sequence[Load]) -> int:
        """Begin to load, and return the index for ``counter``. Every layer is completed, or the load fails as a whole.
        Never waits."""

    def finish(self, index: int) -> bool:
        """Wait until nothing of a batch is written any more. Return whether all of it is loaded."""
        return bool(self.counter.finish(index))

    def reset(self) -> None:
        """Wait until nothing is written any more, and forget all loads."""
        self.counter.reset()

    @abstractmethod
    def close(self) -> None:
        """End the work under way."""


class ValueLoader(Loader):
    """Copies values on a thread, for a pool in the host's memory."""

    def __init__(self, pages: DevicePages, counter: Any) -> None:
        self.counter = counter
        self._pages = pages
        self._thread = ThreadPoolExecutor(1, "kvfetch-load", use_one_thread)

    def attach(self, memory: torch.Tensor, cache_bytes: int) -> None:
        pass  # it is read as it is

    def prepare(self, staged: StagedValues) -> None:
        pass

    def begin(self, loads: Sequence[Load]) -> int:
        index: int = self.counter.update_producer()
        self._thread.submit(self._run, index, loads)
        return index

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, index: int, loads: Sequence[Load]) -> None:
        try:
            for layer in range(self._pages.geometry.num_layers):
                for load in loads:
                    self._copy_twice_at_most(layer, load)
                self.counter.complete(index, layer)
        except Exception as error:
            logger.exception("kvfetch: loading failed; SGLang aborts the requests of this batch's loads")
            metrics.MISSES.labels("load", "internal").inc()
            self.counter.fail(index, error)
        finally:
            for load in loads:
                load.on_end(True)

    def _copy_twice_at_most(self, layer: int, load: Load) -> None:
        """Copy a layer, and once more if that fails: its values are still staged, and SGLang aborts requests whose
        loads fail."""
        try:
            self._copy(layer, load)
        except Exception:
            logger.exception("kvfetch: loading layer %d failed; it is tried once more", layer)
            self._copy(layer, load)

    def _copy(self, layer: int, load: Load) -> None:
        first = load.first_page * self._pages.geometry.page_size
        rows = [x[layer, first : first + load.slots.numel()] for x in load.staged.values]
        self._pages.write_layer(layer, load.slots, *rows)
