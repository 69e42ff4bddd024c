"""Tests of the codec that a server writes if its config names none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sgl_kvfetch.plane import client
from sgl_kvfetch.plane.client import open_encoders
from sgl_kvfetch.plane.config import parse_config


@pytest.mark.parametrize(
    ("has_gpu", "has_nvenc", "config", "expected"),
    [
        (False, False, {}, "hevc"),
        (True, True, {}, "hevc"),
        (True, False, {}, "zstd"),
        (True, False, {"codec": "hevc"}, "hevc"),
        (True, False, {"mode": "read_only"}, "hevc"),
        (True, True, {"codec": "deflate"}, "deflate"),
    ],
)
def test_a_cpu_is_not_left_to_encode_what_a_gpu_computes(
    has_gpu: bool,
    has_nvenc: bool,
    config: dict[str, Any],
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(
        client, "open_nvenc_encoders", lambda _, codecs, *rest: (dict.fromkeys(codecs) if has_nvenc else {}, "")
    )
    assert open_encoders(parse_config({"store": "file:///store"} | config))[0] == expected
    assert ("writes zstd" in caplog.text) == (expected == "zstd")
