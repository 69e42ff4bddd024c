import pytest
import torch

from harness.memory_pool import MemoryPool
from sgl_kvfetch.codec.quant.base import CellValues
from sgl_kvfetch.protocol.arena import consecutive_runs
from sgl_kvfetch.types import KVGeometry


@pytest.mark.parametrize(
    ("pages", "runs"),
    [
        ([], []),
        ([7], [(7, 8, 0, 1)]),
        ([3, 4, 5], [(3, 6, 0, 3)]),
        ([5, 4, 3], [(5, 6, 0, 1), (4, 5, 1, 2), (3, 4, 2, 3)]),
        ([0, 1, 9, 2, 3], [(0, 2, 0, 2), (9, 10, 2, 3), (2, 4, 3, 5)]),
    ],
)
def test_consecutive_pages_form_runs(pages: list[int], runs: list[tuple[int, ...]]) -> None:
    found = [(run.start, run.stop, at.start, at.stop) for run, at in consecutive_runs(pages)]
    assert found == runs


def test_scattered_pages_are_written_where_they_belong() -> None:
    geometry = KVGeometry(num_layers=3, num_heads=2, k_head_dim=4, v_head_dim=4, page_size=2, dtype="float32")
    pool = MemoryPool(geometry, num_pages=8, fill=-1.0)
    pages = [6, 7, 2, 0, 1]
    k = torch.arange(len(pages) * 2 * 1 * 1 * 4, dtype=torch.float32).view(len(pages) * 2, 1, 1, 4)
    pool.write(range(1, 2), range(1, 2), pages, CellValues(k, -k))
    expected = torch.full_like(pool.values["k"], -1.0)
    for index, page in enumerate(pages):
        expected[page, :, 1, 1] = k[index * 2 : index * 2 + 2, 0, 0]
    assert torch.equal(pool.values["k"], expected)
