"""Says what to type when a store cannot be used. The store's client says what was wrong."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlsplit

from sgl_kvfetch.errors import StoreError

_HANDSHAKE_S = 5.0
_S3_KEYS = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the environment to a key that may use this bucket"


def advice(error: StoreError, token_source: str | None) -> str | None:
    """Return what to type, or None if that is not known. ``token_source``: where the token came from, if one was given.

    May ask the server whether it speaks TLS.
    """
    url = urlsplit(error.url or "")
    is_s3 = url.scheme == "s3"
    match error.reason:
        case "refused" if is_s3:
            return "no S3 server answers there: correct AWS_ENDPOINT_URL in the environment, or the network"
        case "refused" if error.url:
            return "no store answers there: start it with kvfetch serve DIRECTORY, or correct the host and port"
        case "unauthorised" if is_s3:
            return _S3_KEYS
        case "unauthorised" if error.url and token_source is not None:
            return f"the token came from {token_source}: give another one with --token-file FILE"
        case "unauthorised" if error.url:
            return "give the store's token: --token-file FILE, or KVFETCH_TOKEN in the environment"
        case "truncated" if url.scheme == "http" and _speaks_tls(url.hostname or "", url.port or 80):
            return f"it speaks TLS: type {url._replace(scheme='https').geturl()}"
    return None


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    try:
        with socket.create_connection((host, port), _HANDSHAKE_S) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False
