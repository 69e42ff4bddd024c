"""How a server is set up."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from sgl_kvfetch.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Raises ConfigError for values that are not allowed, and for an open door: see ``insecure``."""

    root: Path  # the directory with the objects
    host: str = "127.0.0.1"
    port: int = 8700  # 0 picks a free one
    token: str | None = None  # what clients must send
    token_file: Path | None = None  # or where to read it from, at the start
    insecure: bool = False  # allow other hosts in without a token
    capacity_bytes: int | None = None  # evict beyond it; None for no limit
    max_body_bytes: int = 4 << 30  # of one uploaded object
    max_uploads: int = 64  # at the same time; others wait a little, and are then turned away
    upload_wait_s: float = 5.0  # how long they wait
    idle_timeout_s: float = 30.0  # an upload that brings less than a MiB within it is given up
    orphan_age_s: float = 900.0  # when unreferenced data and temporary files are collected
    grace_s: float = 10.0  # for requests in flight when the server stops
    # Shape all responses together to so many 1e9 bits a second: one value, or one for each second, over and over.
    link_gbps: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; expected 0 to 65535")
        if self.token is not None and self.token_file is not None:
            raise ConfigError("token and token_file are both given; expected one of them")
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
                f"host is {self.host!r}, which others can reach, and there is no token; "
                "give a token, or allow anybody in with insecure"
            )

    @property
    def link_samples(self) -> tuple[float, ...]:
        """``link_gbps``, one after the other; none if the link is not shaped."""
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
        """The token, from its file if need be. Raises ConfigError if the file cannot be read or is empty."""
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
    """Names other than ``localhost`` count as reachable: what they resolve to may change."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
