"""A budget for the GPU memory that video decoders use for their surfaces."""

from __future__ import annotations

from threading import Lock

# Surfaces of one decoder: PyNvVideoCodec asks for as many as NVIDIA's parser does and four more, and two for output.
# The parser's number is an estimate; `scripts/gpu_check` compares the sum with the memory that is really used.
NUM_SURFACES = 4 + 4 + 2
MAX_SURFACE_BYTES = 256 << 20  # of all decoders of a process together


def surface_bytes(planes_a_picture: int, width: int, height: int) -> int:
    """Estimate the memory of a decoder. ``planes_a_picture``: 3 for 4:4:4, 1 for 4:2:0, which has half as much chroma
    as luma. ``width``, ``height``: of its pictures."""
    rows = 3 * height if planes_a_picture == 3 else height * 3 // 2
    return NUM_SURFACES * rows * width


class SurfaceBudget:
    """Limits the memory of all decoders. Thread-safe."""

    def __init__(self, limit_bytes: int | None = MAX_SURFACE_BYTES) -> None:
        self.limit_bytes = limit_bytes  # may be set at any time; None: no limit
        self.taken_bytes = 0
        self._lock = Lock()

    def take(self, num_bytes: int) -> bool:
        """Reserve memory for a decoder. Return False if there is no room. A single decoder is always allowed, however
        large."""
        with self._lock:
            limit = self.limit_bytes
            if limit is not None and self.taken_bytes and self.taken_bytes + num_bytes > limit:
                return False
            self.taken_bytes += num_bytes
            return True

    def give_back(self, num_bytes: int) -> None:
        """Release the memory of a decoder that is gone."""
        with self._lock:
            self.taken_bytes -= num_bytes
