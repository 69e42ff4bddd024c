"""A thread that computes alone, and leaves the others as they are."""

from concurrent.futures import ThreadPoolExecutor

import torch

from sgl_kvfetch.openmp import use_one_thread


def test_only_the_calling_thread_computes_alone() -> None:
    own = torch.get_num_threads()
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(1) as later:
        first.submit(torch.set_num_threads, 3).result()
        alone.submit(use_one_thread).result()
        assert alone.submit(torch.get_num_threads).result() == 1
        assert later.submit(torch.get_num_threads).result() == 3
        assert first.submit(torch.get_num_threads).result() == 3
        later.submit(torch.set_num_threads, own).result()
    assert torch.get_num_threads() == own
