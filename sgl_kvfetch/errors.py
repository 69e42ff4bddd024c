"""Domain errors. Faults in outside input (bytes, config, a peer) raise one of these; our own bugs assert."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

# What decoding JSON or MessagePack from outside raises: also for text that is not UTF-8, and for values in fields that
# no type knows, which nest without end.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

StoreErrorReason = Literal[
    "refused",  # no connection
    "tls",  # no connection: the certificate is not trusted, or the server does not speak TLS
    "timeout",  # deadline passed
    "unauthorised",  # 401 or 403
    "too_large",  # body over the store's limit
    "full",  # no room left
    "invalid",  # the store rejects the request or the object as malformed
    "server",  # 5xx
    "proxy",  # 502 or 504: a proxy in front of the store does not reach it, or waits no longer
    "clock",  # the server refuses this machine's time
    "truncated",  # connection closed in mid-body or wrong length
    "protocol",  # an invalid answer
    "io",  # the local file system failed
    "skipped",  # no request was sent, since the store keeps failing
    "missing",  # an object that a manifest names is gone
    "coarse",  # a segment is coarser than a reader may use
]


class KVFetchError(Exception):
    """Base of every error that sgl_kvfetch raises on purpose."""

    @property
    def concerns_object(self) -> bool:
        """Whether the failure concerns one object, not the whole store."""
        return True


class ConfigError(KVFetchError, ValueError):
    """A configuration key is unknown or a value is not allowed."""


class SeamError(KVFetchError):
    """The installed SGLang differs from the one that this plugin was checked against."""


class UnsupportedError(KVFetchError):
    """The model, pool or launch flags need a feature that is not implemented."""


class QuantiseError(KVFetchError):
    """A tensor cannot be quantised (wrong dtype, or values that are not finite)."""


class FormatError(KVFetchError):
    """Stored bytes do not follow the format."""


class FormatVersionError(FormatError):
    """Stored bytes follow a newer or an unknown version of the format."""


class EncryptedError(FormatError):
    """Stored bytes are encrypted with a key that this reader does not have. The message has its name."""


class CorruptError(FormatError):
    """Stored bytes do not match their checksum, or do not decode."""


class NamespaceMismatchError(KVFetchError):
    """A manifest belongs to another namespace. The message names the first field that differs."""


class StoreError(KVFetchError):
    """A store could not carry out a request. A missing object is not an error: it is ``None``.

    ``reason`` is a fixed word (see ``StoreErrorReason``), usable as a metric label; ``retriable`` says whether the same
    request may succeed later. ``url`` is the remote store's, once its client has raised the error.
    """

    _OF_OBJECT: ClassVar = frozenset({"truncated", "io", "invalid", "too_large", "full", "protocol", "missing"})

    def __init__(self, reason: StoreErrorReason, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.reason: StoreErrorReason = reason
        self.retriable = retriable
        self.url: str | None = None

    @property
    def concerns_object(self) -> bool:
        return self.reason in self._OF_OBJECT


def why(error: OSError | UnicodeDecodeError) -> str:
    """Return what failed with a file, without the file's name: the messages around it have that already."""
    return getattr(error, "strerror", None) or str(error)


def require_positive(config: object, *fields: str) -> None:
    """Raise ConfigError unless each of these fields is more than 0, or None."""
    for field in fields:
        value = getattr(config, field)
        if value is not None and not value > 0:
            raise ConfigError(f"{field} is {value}; expected more than 0")
