"""The configuration of a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from sgl_kvfetch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Raises ConfigError for invalid values, and for a public host without a token unless ``insecure`` is set."""

    root: Path  # the directory with the objects
    host: str = "127.0.0.1"
    port: int = 8700  # 0 picks a free one
    token: str | None = None  # bearer token that clients must send
    token_file: Path | None = None  # file to read the token from at start, instead of ``token``
    insecure: bool = False  # allow access from other hosts without a token
    capacity_bytes: int | None = None  # segments are evicted above it; None for no limit
    max_body_bytes: int = 4 << 30  # per uploaded object
    max_uploads: int = 64  # concurrent uploads; further ones wait for ``upload_wait_s``, then get 503
    upload_wait_s: float = 5.0
    idle_timeout_s: float = 30.0  # an upload is aborted if a MiB takes longer to arrive
    orphan_age_s: float = 900.0  # unreferenced data and temporary files are deleted at this age
    grace_s: float = 10.0  # time for requests in flight when the server stops
    # Limit all responses together to this bandwidth, in 1e9 bits per second: one value, or one per second, repeated.
    link_gbps: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file are both given; expected only one of them")
        if self.token is not None and not self.token.strip():
            raise ConfigError("token is empty")
        for field in ("capacity_bytes", "max_body_bytes", "max_uploads", "idle_timeout_s", "orphan_age_s"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ConfigError(f"{field} is {value}; expected more than 0")
        if self.link_gbps is not None and (min(self.link_samples) < 0 or not any(self.link_samples)):
            raise ConfigError(f"link_gbps is {self.link_gbps}; expected 0 or more, and not always 0")
        for field in ("upload_wait_s", "grace_s"):
            if getattr(self, field) < 0:
                raise ConfigError(f"{field} is {getattr(self, field)}; expected 0 or more")
        if not (self.has_token or self.insecure or is_loopback(self.host)):
            raise ConfigError(
                f"host is {self.host!r}, which other machines can reach, but there is no token; "
                "give a token, or set insecure to allow access without one"
            )

    @property
    def link_samples(self) -> tuple[float, ...]:
        """``link_gbps`` as a tuple with one value per second; empty if bandwidth is not limited."""
        match self.link_gbps:
            case None:
                return ()
            case tuple():
                return self.link_gbps
        return (self.link_gbps,)

    @property
    def has_token(self) -> bool:
        return self.token is not None or self.token_file is not None

    def read_token(self) -> str | None:
        """Return the token, or None if none is set. Raises ConfigError if its file cannot be read or is empty."""
        if self.token_file is None:
            return self.token.strip() if self.token is not None else None
        try:
            token = self.token_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"token_file {self.token_file} cannot be read: {e}") from e
        if not token:
            raise ConfigError(f"token_file {self.token_file} is empty")
        return token


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``. No name but ``localhost`` counts: DNS may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
