"""The configuration of a server."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sgl_kvfetch.errors import ConfigError, require_positive, why
from sgl_kvfetch.server.tokens import Role, TokenFile, Tokens
from sgl_kvfetch.stores import AdminStore, HttpOptions, S3Options, TlsFiles, open_remote, split_store_url
from sgl_kvfetch.tls import FreshContext, OnEnds, ends_of
from sgl_kvfetch.user_files import TOKEN_ENV, FreshFiles, read_token_file, require_secret, warn_if_all_may_read

_UPSTREAM_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Configures a server.

    Raises ConfigError for invalid values, and for a public host without a token unless ``insecure`` is set. Messages
    name the options of ``kvfetch serve``.
    """

    root: Path  # the directory with the objects
    host: str = "127.0.0.1"
    port: int = 8700  # 0 picks a free one
    token: str | None = None  # bearer token that clients must send; it permits everything
    token_file: Path | None = None  # instead of ``token``: tokens by role (see ``parse_tokens``), read again on change
    insecure: bool = False  # allow access from other hosts without a token
    capacity_bytes: int | None = None  # segments are evicted above it; None for no limit
    drop_levels: int = 0  # that a segment loses before any segment is evicted
    max_body_bytes: int = 16 << 30  # per uploaded object
    max_uploads: int = 64  # concurrent uploads; further ones wait for ``upload_wait_s``, then get 503
    upload_wait_s: float = 5.0
    max_connections: int = 4096  # further clients get 503; fewer if the limit of open files is low
    # A connection is closed if no request arrives for this long, or if a MiB of an upload or of an answer takes longer.
    idle_timeout_s: float = 30.0
    tls_cert: Path | None = None  # PEM file with the certificate and its chain; with it, the server speaks only TLS
    tls_key: Path | None = None  # PEM file with the certificate's key
    tls_client_ca: Path | None = None  # PEM file; clients must have a certificate that one of these CAs signed
    orphan_age_s: float = 900.0  # data without a manifest is deleted at this age
    grace_s: float = 10.0  # time for requests in flight when the server stops
    upstream: str | None = None  # URL of the store that this one is in front of
    upstream_token_file: Path | None = None  # its token, read again on change
    upstream_index: str | None = None  # the index of an ``s3://`` upstream
    tls_client_cert: str | None = None  # PEM file, for an upstream that demands a certificate
    tls_client_key: str | None = None  # its key, if that is not in the same file

    def __post_init__(self) -> None:
        """Raises ConfigError for values out of range, and for options that need or exclude each other."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")
        assert self.token is None or (self.token.strip() and self.token_file is None)
        require_secret((self.token or "").strip(), TOKEN_ENV)
        require_positive(self, "capacity_bytes", "max_body_bytes", "max_uploads", "max_connections")
        require_positive(self, "idle_timeout_s", "orphan_age_s")
        if (self.tls_cert is None) != (self.tls_key is None) or (self.tls_client_ca and not self.tls_cert):
            raise ConfigError("--tls-cert and --tls-key need each other, and --tls-client-ca needs both")
        for field in ("upload_wait_s", "grace_s"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; expected 0 or more")
        self._check_upstream()
        if not (self.has_token or self.insecure or is_loopback(self.host)):
            raise ConfigError(
                f"other machines can reach --host {self.host}, and there is no token: give --token-file FILE (openssl "
                "rand -hex 32 makes a token), or --insecure to let everybody read, write and delete"
            )

    def open_upstream(self, on_ends: OnEnds = lambda ends: None) -> AdminStore | None:
        """Return a client of the upstream; None if there is none. Raises ConfigError."""
        if self.upstream is None:
            return None
        path = self.upstream_token_file
        return open_remote(
            self.upstream,
            token=None if path is None else FreshFiles("token", (path,), lambda: read_token_file(path, "the token")),
            options=HttpOptions(
                tls=TlsFiles(cert=self.tls_client_cert, key=self.tls_client_key, on_ends=on_ends),
                max_connections=_UPSTREAM_CONNECTIONS,
            ),
            s3=S3Options(index=self.upstream_index),
        )

    def _check_upstream(self) -> None:
        """Raises ConfigError."""
        options = {"--upstream-token-file": self.upstream_token_file, "--index": self.upstream_index}
        given = [option for option, value in options.items() if value is not None]
        if self.upstream is None:
            if given:
                raise ConfigError(f"{given[0]} is for the store that --upstream names, and that is not given")
            return
        parts = split_store_url(self.upstream)
        if self.upstream_index is not None and parts.scheme != "s3":
            raise ConfigError(f"--index is for s3:// stores; {self.upstream} has its own")
        is_here = is_loopback(self.host) or self.host in ("", "0.0.0.0", "::")
        hosts = {self.host, *(("localhost", "127.0.0.1", "::1") if is_here else ())}
        if parts.scheme != "s3" and parts.hostname in hosts and parts.port == self.port:
            raise ConfigError(f"--upstream {self.upstream} is this store itself")

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    @property
    def access(self) -> str:
        """Describe in words which clients the store answers."""
        if self.token_file is not None:
            return f"with tokens of {self.token_file}"
        if self.token is not None:
            return "with one token"
        who = "everybody on this machine" if is_loopback(self.host) else "EVERYBODY who reaches this address"
        return f"{who}, without a token"

    def read_tokens(self) -> Tokens:
        """Return the tokens. Raises ConfigError if the token file cannot be read or is malformed."""
        if self.token_file is not None:
            return TokenFile(self.token_file)
        return Tokens(None if self.token is None else {self.token.strip(): Role.ADMIN})

    @property
    def _tls_files(self) -> list[Path]:
        return [path for path in (self.tls_cert, self.tls_key, self.tls_client_ca) if path is not None]

    def tls_context(self, on_ends: OnEnds = lambda ends: None) -> FreshContext | None:
        """Return None if the server does not speak TLS. Raises ConfigError if a file cannot be read."""
        if self.tls_cert is None:
            return None
        return FreshContext(FreshFiles("certificates", self._tls_files, partial(self._read_certificates, on_ends)))

    def _read_certificates(self, on_ends: OnEnds) -> ssl.SSLContext:
        assert self.tls_cert is not None
        assert self.tls_key is not None
        warn_if_all_may_read(self.tls_key)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")  # never asks on a terminal
            if self.tls_client_ca is not None:
                context.load_verify_locations(self.tls_client_ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except OSError as e:
            files = ", ".join(map(str, self._tls_files))
            raise ConfigError(f"cannot read the certificates in {files}: {why(e)}") from e
        on_ends(ends_of(self.tls_cert, self.tls_client_ca))
        return context


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. No name but ``localhost`` counts: DNS may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
