"""Which codec a server writes if its user names none: the fastest for the bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.plane.config import parse_config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, "zstd"),
        ({"quantiser": "uint8"}, "zstd"),
        ({"profile": "a.profile"}, "ans"),
        ({"profile": "a.profile", "codec": "hevc"}, "hevc"),
        ({"codec": "hevc"}, "hevc"),
    ],
)
def test_the_fastest_codec_is_written(config: dict[str, Any], expected: str) -> None:
    assert parse_config({"store": "file:///store"} | config).codec_name == expected


def test_ans_needs_coefficients(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="codec = 'ans' needs quantiser = 'klt', not 'exact'; use zstd, or hevc"):
        parse_config({"store": f"file://{tmp_path}", "codec": "ans"})
