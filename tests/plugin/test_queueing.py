from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sgl_kvfetch.plugin import queueing
from sgl_kvfetch.plugin.queueing import PageRun, queue_pages
from sgl_kvfetch.types import TensorName

HASHES = [bytes([number]) * 32 for number in range(10)]
RUN = PageRun(first_page=5, previous_hash=b"before", page_hashes=HASHES, pool_pages=range(20, 30))

Read = Callable[[torch.Tensor, torch.Tensor], bool]


@dataclass
class Written:
    first_page: int
    previous_hash: bytes | None
    hashes: Sequence[bytes]
    k: list[int]
    v: list[int]


@dataclass
class Plane:
    """The part of a data plane that takes pages, four at a time."""

    room: int = 10  # pages
    written: list[Written] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)

    def most_pages(self) -> int:
        return 4

    def write(
        self, first_page: int, previous_hash: bytes | None, hashes: Sequence[bytes], read: Read, timeout_s: float
    ) -> bool:
        self.waits.append(timeout_s)
        k, v = torch.empty(2, len(hashes), dtype=torch.int64)
        if len(hashes) > self.room or not read(k, v):
            return False
        self.room -= len(hashes)
        self.written.append(Written(first_page, previous_hash, hashes, k.tolist(), v.tolist()))
        return True


def read(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor(pages) * (1 if tensor == "k" else -1)


def queue_all(plane: Any, read: Any = read) -> int:
    return queue_pages(plane, RUN, read)


def test_pages_are_written_in_consecutive_pieces() -> None:
    plane = Plane()
    assert queue_all(plane) == 10
    assert [piece.first_page for piece in plane.written] == [5, 9, 13]
    assert [piece.previous_hash for piece in plane.written] == [b"before", HASHES[3], HASHES[7]]
    assert [h for piece in plane.written for h in piece.hashes] == HASHES
    assert [page for piece in plane.written for page in piece.k] == [*range(20, 30)]
    assert [-page for piece in plane.written for page in piece.v] == [*range(20, 30)]


def test_pages_without_room_are_left_out() -> None:
    assert queue_all(Plane(room=9)) == 8


def test_all_pieces_share_one_deadline_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]

    class Slow(Plane):
        def write(self, *args: Any) -> bool:
            done = super().write(*args)
            now[0] += 0.7
            return done

    monkeypatch.setattr(queueing.time, "monotonic", lambda: now[0])
    plane = Slow()
    assert queue_all(plane) == 10
    assert plane.waits == pytest.approx([1.0, 0.3, 0.0])


@pytest.mark.parametrize("gone", ["k", "v"])
def test_queueing_ends_at_unavailable_pages(gone: str) -> None:
    plane = Plane()
    assert queue_all(plane, lambda t, pages: None if t == gone and pages[0] >= 24 else read(t, pages)) == 4
    assert len(plane.written) == 1


def test_exceptions_of_read_are_raised() -> None:
    def fail(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match="no device"):
        queue_all(Plane(), fail)
