"""When certificates end. tests/server/test_tls.py has handshakes, and files that are replaced."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
import trustme

from sgl_kvfetch.tls import ends_of


@pytest.mark.parametrize("year", [2049, 2050])  # from 2050 on, certificates have years of four digits
def test_when_certificates_end(year: int, tmp_path: Path) -> None:
    end = datetime(year, 3, 4, 5, 6, 7, tzinfo=UTC)
    leaf = trustme.CA(key_type=trustme.KeyType.ECDSA).issue_cert("127.0.0.1", not_after=end)
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "cert.pem")
    others = [trustme.CA(key_type=trustme.KeyType.ECDSA) for _ in range(2)]
    for each in others:
        each.cert_pem.write_to_path(tmp_path / "ca.pem", append=True)
    assert ends_of(tmp_path / "cert.pem", None) == {"cert": end.timestamp()}
    assert list(ends_of(None, tmp_path / "ca.pem")) == ["ca"]
    assert ends_of(tmp_path / "none.pem", None) == {}
