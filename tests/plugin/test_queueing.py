from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sgl_kvfetch.plugin import queueing
from sgl_kvfetch.plugin.queueing import PageRun, queue_pages
from sgl_kvfetch.types import TensorName
from sgl_kvfetch.write.gather import PageBatch

HASHES = [bytes([number]) * 32 for number in range(10)]
RUN = PageRun(first_page=5, previous_hash=b"before", page_hashes=HASHES, pool_pages=range(20, 30))


@dataclass
class Queue:
    """The part of a writer that takes pages."""

    room_bytes: int
    used_bytes: int = 0
    batches: list[PageBatch] = field(default_factory=list)

    def reserve(self, num_bytes: int, timeout_s: float) -> bool:
        if self.used_bytes + num_bytes > self.room_bytes:
            return False
        self.used_bytes += num_bytes
        return True

    def release(self, num_bytes: int) -> None:
        self.used_bytes -= num_bytes

    def submit(self, batch: PageBatch) -> None:
        self.batches.append(batch)


def read(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
    return torch.tensor(pages) * (1 if tensor == "k" else -1)


def queue_all(queue: Any, read: Any = read) -> int:
    return queue_pages(queue, RUN, read, page_bytes=100, queue_bytes=1600)  # so four at a time


def test_pages_go_in_pieces_that_follow_one_another() -> None:
    queue = Queue(1600)
    assert queue_all(queue) == 10
    assert [batch.first_page for batch in queue.batches] == [5, 9, 13]
    assert [batch.previous_hash for batch in queue.batches] == [b"before", HASHES[3], HASHES[7]]
    assert [h for batch in queue.batches for h in batch.page_hashes] == HASHES
    for tensor, sign in (("k", 1), ("v", -1)):
        values = torch.cat([piece for batch in queue.batches for piece in batch.values[tensor]])  # type: ignore[index]
        assert values.tolist() == [sign * page for page in range(20, 30)]
    assert queue.used_bytes == 1000


def test_what_finds_no_room_is_left() -> None:
    queue = Queue(900)
    assert queue_all(queue) == 8
    assert queue.used_bytes == 800


def test_the_wait_for_room_is_one_for_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    waits = []

    class Slow(Queue):
        def reserve(self, num_bytes: int, timeout_s: float) -> bool:
            waits.append(timeout_s)
            now[0] += 0.7
            return super().reserve(num_bytes, timeout_s)

    monkeypatch.setattr(queueing.time, "monotonic", lambda: now[0])
    assert queue_all(Slow(1600)) == 10
    assert waits == pytest.approx([1.0, 0.3, 0.0])


@pytest.mark.parametrize("gone", ["k", "v"])
def test_room_is_given_back_when_pages_are_not_to_be_had(gone: str) -> None:
    queue = Queue(1600)
    assert queue_all(queue, lambda t, pages: None if t == gone and pages[0] >= 24 else read(t, pages)) == 4
    assert queue.used_bytes == 400
    assert len(queue.batches) == 1


def test_room_is_given_back_when_reading_fails() -> None:
    def fail(tensor: TensorName, pages: Sequence[int]) -> torch.Tensor:
        raise RuntimeError("no device")

    queue = Queue(1600)
    with pytest.raises(RuntimeError, match="no device"):
        queue_all(queue, fail)
    assert queue.used_bytes == 0
