from __future__ import annotations

from typing import Any

import pytest

from sgl_kvfetch.plugin.weight_updates import Access
from sgl_kvfetch.protocol.config import parse_config


def make(**config: Any) -> Access:
    return Access(parse_config({"store": "http://store", **config}))


@pytest.mark.parametrize(
    ("mode", "expected"), [("read_write", (True, True)), ("read_only", (True, False)), ("write_only", (False, True))]
)
def test_access_is_as_configured_until_the_weights_change(
    mode: str, expected: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    access = make(mode=mode)
    assert (access.reads, access.writes) == expected
    for _ in range(2):
        access.suspend("other weights")
    assert (access.reads, access.writes) == (False, False)
    assert [record.message for record in caplog.records] == ["kvfetch neither reads nor writes any more: other weights"]
