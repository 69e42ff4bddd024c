"""Tests of the codec that a server writes if its config names none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_kvfetch.plane.client import writer_codec
from sgl_kvfetch.plane.config import parse_config


@pytest.mark.parametrize(
    ("has_gpu", "config", "expected"),
    [
        (False, {}, "hevc"),
        (True, {}, "zstd"),
        (True, {"codec": "hevc"}, "hevc"),
        (True, {"mode": "read_only"}, "hevc"),
        (True, {"codec": "deflate"}, "deflate"),
    ],
)
def test_a_cpu_is_not_left_to_encode_what_a_gpu_computes(
    has_gpu: bool,
    config: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert writer_codec(parse_config({"store": "file:///store"} | config)) == expected
    assert ("writes zstd" in caplog.text) == (expected == "zstd")
