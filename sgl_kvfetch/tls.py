"""TLS: contexts that follow their files, when certificates end, and what a failed handshake means.

Certificates live for weeks, and servers and clients for months. So nobody keeps an `ssl.SSLContext` as it was made:
`FreshContext` stands for one wherever a context is taken, and each handshake uses what the files hold by then.
Connections that are open go on as they are.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

from sgl_kvfetch.errors import StoreError
from sgl_kvfetch.log import printable
from sgl_kvfetch.user_files import FreshFiles

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
# The validity in a certificate (RFC 5280, 4.1.2.5): a sequence of two times, as UTCTime or GeneralizedTime.
_VALIDITY = re.compile(rb"\x30[\x1e\x20\x22](?:\x17\x0d|\x18\x0f)\d{12,14}Z(?:\x17\x0d|\x18\x0f)(\d{12,14})Z")
# Of OpenSSL: a self-signed certificate, one in the chain, and two for an issuer that is not known.
_UNKNOWN_CA = frozenset({18, 19, 20, 21})
_WRONG_TIME = frozenset({9, 10})  # not yet valid, expired
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"})
_ALERT = re.compile(r"(?:SSLV3|TLSV1|TLSV13)_ALERT_(\w+)")
_CERTIFICATE_ALERTS = {
    "CERTIFICATE_REQUIRED": "it wants a certificate from us, and got none",
    "CERTIFICATE_EXPIRED": "our certificate has expired",
    "CERTIFICATE_REVOKED": "our certificate was revoked",
    "UNKNOWN_CA": "no CA that it knows has signed our certificate",
    "BAD_CERTIFICATE": "our certificate is not valid there",
    "CERTIFICATE_UNKNOWN": "our certificate is not valid there",
    "UNSUPPORTED_CERTIFICATE": "our certificate is of a kind that it does not take",
    "ACCESS_DENIED": "our certificate has no right to connect",
}


OnEnds: TypeAlias = "Callable[[Mapping[str, float]], None]"
"""Gets what `ends_of` returns whenever certificates were read, on any thread."""


class FreshContext(ssl.SSLContext):
    """An SSL context whose handshakes use the context that was made last from its files. Sockets, asyncio and aiohttp
    take it like any other; its own settings count for nothing."""

    files: FreshFiles[ssl.SSLContext]

    def __new__(cls, files: FreshFiles[ssl.SSLContext]) -> FreshContext:
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, files: FreshFiles[ssl.SSLContext]) -> None:
        self.files = files

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return self.files.value.wrap_socket(*args, **options)

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.files.value.wrap_bio(*args, **options)


def ends_of(cert: str | Path | None, ca: str | Path | None) -> dict[str, float]:
    """Return when PEM files end, in seconds since the epoch: ``cert``, a chain, with its first certificate that ends,
    and ``ca``, a list of CAs, with its last one. Files without a certificate are left out."""
    found = {"cert": min(_ends(cert), default=None), "ca": max(_ends(ca), default=None)}
    return {name: end_s for name, end_s in found.items() if end_s is not None}


def _ends(path: str | Path | None) -> list[float]:
    try:
        text = "" if path is None else Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    found = (_VALIDITY.search(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(text))
    return [_seconds(match[1].decode()) for match in found if match]


def _seconds(text: str) -> float:
    """Convert a certificate's time, such as 491231235959 or 20501231235959. Two digits mean a year up to 2049."""
    century = "" if len(text) == 14 else "19" if text >= "50" else "20"
    return datetime.strptime(century + text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def tls_error(what: str, server: str, cause: BaseException | None) -> StoreError:
    """Return what a handshake's failure means. ``server``: its host and port."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        if cause.verify_code in _UNKNOWN_CA:
            return StoreError(
                "tls",
                f"{what}: no CA that this machine knows has signed the certificate of {server} "
                f"({cause.verify_message}): name the file of its CA, as SSL_CERT_FILE in the environment, or as "
                "tls.ca_file in the config of SGLang's backend",
            )
        said = f"{cause.verify_message}{of_wrong_time(cause)}"
        return StoreError("tls", f"{what}: the certificate of {server} does not hold: {said}")
    if (against := refusal(cause)) is not None:
        return StoreError("tls", f"{what}: {server} refuses the TLS handshake: {against}")
    if isinstance(cause, ssl.SSLError) and cause.reason in _NO_TLS:
        return StoreError("tls", f"{what}: {server} does not speak TLS: write its URL with http://")
    said = printable(str(cause)[:500]) or type(cause).__name__
    return StoreError("refused", f"{what}: TLS with {server} failed: {said}", retriable=True)


def of_wrong_time(error: ssl.SSLCertVerificationError) -> str:
    """Return what to add to a message if a certificate does not hold at this machine's time."""
    if error.verify_code not in _WRONG_TIME:
        return ""
    return f", by this machine's clock, which says {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def refusal(error: BaseException | None) -> str | None:
    """Return what a peer has against our certificate, if an error, or what caused it, is its refusal."""
    while error is not None:
        alert = _ALERT.search(str(error))
        if alert is not None and alert[1] in _CERTIFICATE_ALERTS:
            return _CERTIFICATE_ALERTS[alert[1]]
        error = error.__cause__ or error.__context__
    return None
