"""Windows for the divergence by length."""

import pytest
import torch

from benchmarks.codec.lengths import spread_windows
from sgl_kvfetch.errors import ConfigError


def test_windows_reach_from_a_texts_start_to_its_end_and_their_continuations_do_not_overlap() -> None:
    windows = spread_windows(torch.arange(1000), 5, most=700, continuation=60)
    assert [(int(w[0]), int(w[-1])) for w in windows] == [(0, 759), (60, 819), (120, 879), (180, 939), (240, 999)]


def test_a_text_too_short_for_separate_continuations_is_refused() -> None:
    with pytest.raises(ConfigError, match="999 tokens, too few for 5 windows of 700"):
        spread_windows(torch.arange(999), 5, most=700, continuation=60)
