"""One OpenMP thread for copies in the engine's process.

With a team of our own, the process would have more OpenMP threads than cores. Then libgomp's threads sleep, instead of
spinning, between the parts of a computation, and a model on a CPU is a third slower from then on.
"""

from __future__ import annotations

import threading

import torch

_lock = threading.Lock()


def use_one_thread() -> None:
    """Let the calling thread compute alone. Other threads keep their teams, also those that begin to compute later:
    `torch.set_num_threads` would change theirs, too."""
    with _lock:  # a second thread would take the 1 of the first for what others have
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        others = threading.Thread(target=torch.set_num_threads, args=(before,), name="kvfetch-openmp")
        others.start()
        others.join()
