from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.server.config import ServerConfig

ROOT = Path("unused")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "store.example", ""])
def test_a_public_host_needs_a_token_or_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="no token"):
        ServerConfig(ROOT, host=host)
    assert ServerConfig(ROOT, host=host, token="t").has_token
    assert ServerConfig(ROOT, host=host, token_file=Path("token")).has_token
    assert ServerConfig(ROOT, host=host, insecure=True).insecure


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    ServerConfig(ROOT, host=host)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"port": -1}, "port is -1"),
        ({"port": 65536}, "port is 65536"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"max_body_bytes": 0}, "max_body_bytes is 0"),
        ({"max_uploads": 0}, "max_uploads is 0"),
        ({"max_connections": 0}, "max_connections is 0"),
        ({"idle_timeout_s": 0}, "idle_timeout_s is 0"),
        ({"upload_wait_s": -1}, "upload_wait_s is -1"),
        ({"grace_s": -1}, "grace_s is -1"),
        ({"orphan_age_s": 0}, "orphan_age_s is 0"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerConfig(ROOT, **options)
