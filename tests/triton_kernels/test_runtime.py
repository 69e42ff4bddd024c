"""What kernels share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sgl_kvfetch.triton_kernels.runtime import INTERPRETED, jit, tl


@jit
def _number_programs(p_out):  # type: ignore[no-untyped-def]
    i_program = tl.program_id(0)
    tl.store(p_out + i_program, i_program)


@pytest.mark.skipif(not INTERPRETED, reason="Triton does not interpret: a GPU runs kernels beside each other")
def test_threads_interpret_with_grids_of_their_own() -> None:
    """SGLang's kernels run in the scheduler's thread, while others of its process quantise and restore."""

    def numbered(num_programs: int) -> bool:
        out = torch.full((num_programs,), -1)
        for _ in range(20):
            _number_programs[(num_programs,)](out)
        return torch.equal(out, torch.arange(num_programs))

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(numbered, [100, 200, 100, 200]))
