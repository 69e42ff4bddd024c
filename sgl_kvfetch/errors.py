"""Domain errors. Whatever came from outside (bytes, config, a peer) raises one of these; our own bugs assert."""

from __future__ import annotations

from typing import Literal

StoreErrorReason = Literal[
    "refused",  # no connection
    "timeout",  # deadline passed
    "unauthorised",  # 401 or 403
    "too_large",  # body over the store's limit
    "full",  # no room left
    "invalid",  # the store rejects the request or the object as malformed
    "server",  # 5xx
    "truncated",  # connection closed in mid-body or wrong length
    "protocol",  # an answer that makes no sense
    "io",  # the local file system failed
    "skipped",  # not even asked, since the store keeps failing
    "missing",  # an object that a manifest names is gone
]


class KVFetchError(Exception):
    """Base of every error that sgl_kvfetch raises on purpose."""


class ConfigError(KVFetchError, ValueError):
    """A configuration key is unknown or a value is not allowed."""


class SeamError(KVFetchError):
    """The installed SGLang is not the one this plugin was checked against."""


class UnsupportedError(KVFetchError):
    """The model, pool or launch flags need something that is not there yet."""


class QuantiseError(KVFetchError):
    """A tensor cannot be quantised (wrong dtype, or values that are not finite)."""


class EncodeError(KVFetchError):
    """An encoder made a bitstream that decodes to something else."""


class FormatError(KVFetchError):
    """Stored bytes do not follow the format."""


class FormatVersionError(FormatError):
    """Stored bytes follow a newer or an unknown version of the format."""


class CorruptError(FormatError):
    """Stored bytes do not match their checksum, or do not decode."""


class NamespaceMismatchError(KVFetchError):
    """A manifest belongs to another namespace. The message names the first field that differs."""


class StoreError(KVFetchError):
    """A store could not do what was asked. A missing object is not an error: it is ``None``.

    ``reason`` is a fixed word (see ``StoreErrorReason``), fit for a metric's label; ``retriable`` says whether the
    same request may succeed later.
    """

    def __init__(self, reason: StoreErrorReason, message: str, *, retriable: bool = False) -> None:
        super().__init__(message)
        self.reason: StoreErrorReason = reason
        self.retriable = retriable
