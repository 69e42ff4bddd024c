"""What users write: URLs of stores, sizes, durations, text files, and secrets in files and in the environment; files
that they replace while we run; and files that are kept for them.

Editors put characters into files that nobody sees: a byte order mark at the start, spaces of no width after a copy from
a web page. In a secret, they would only show as a refusal elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.log import LimitedLogger

T = TypeVar("T")

logger = logging.getLogger(__name__)
_limited = LimitedLogger(logger)

# The form of a store's URL, by its scheme.
STORE_URLS = {"http": "http://HOST:PORT", "https": "https://HOST:PORT", "s3": "s3://BUCKET/PREFIX"}

UNITS = "kmgtp"
_TOO_MANY_BYTES = 1 << 63
_DURATIONS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_SIZE = re.compile(r"(?P<number>[0-9]+(?:\.[0-9]+)?) *(?:(?P<unit>[kmgtp])(?P<binary>i)?)?(?P<bytes>b)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return a number of bytes. ``10GiB`` means powers of 1024, ``500MB`` powers of 1000, ``60B`` bytes.

    Raises ConfigError, also for ``10G``, which is ambiguous, and for a bare number: some would mean GiB by it.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is not None and not match["unit"] and not match["bytes"]:
        number = match["number"] if len(match["number"]) < 20 else "such a number"
        raise ConfigError(f"invalid size: {number} what? say {number}GiB or {number}B")
    if match is None or not match["bytes"]:
        raise ConfigError(f"invalid size {text!r}; expected a form such as 10GiB, 500MB or 4096B")
    power = UNITS.index(match["unit"].lower()) + 1 if match["unit"] else 0
    size = float(match["number"]) * (1024 if match["binary"] else 1000) ** power
    if not 1 <= size < _TOO_MANY_BYTES:
        shown = text if len(text) < 40 else f"{text[:40]}..."
        raise ConfigError(f"invalid size {shown!r}; expected at least one byte, and less than 8 EiB")
    return int(size)


def format_size(num_bytes: int) -> str:
    """Format a size with three significant digits, in powers of 1024."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < len(UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.3g} {UNITS[unit - 1].upper()}iB" if unit else f"{num_bytes} B"


def parse_duration(text: str) -> float:
    """Return a time in seconds. Units are s, m (minutes), h and d. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([smhd])", text.strip())
    if match is None:
        raise ConfigError(f"invalid duration {text!r}; expected a form such as 90s, 45m, 12h or 30d")
    return float(match[1]) * _DURATIONS_S[match[2]]


TOKEN_ENV = "KVFETCH_TOKEN"  # a store's bearer token, for servers and commands


def read_text(path: str | Path, what: str) -> str:
    """Return a file's text in UTF-8, without a byte order mark. ``what`` begins the error.

    Raises ConfigError, which quotes nothing of the file.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as e:
        raise ConfigError(f"{what} {path} cannot be read: {e.strerror or e}") from e
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path} cannot be read: it is not UTF-8") from None  # which would show the content


def write_file(path: Path, content: bytes, what: str) -> None:
    """Write a file. ``what`` begins the error. Raises ConfigError."""
    try:
        path.write_bytes(content)
    except OSError as e:
        raise ConfigError(f"{what} {path} cannot be written: {e.strerror or e}") from e


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file, or leave the one that is there as it is. Several may do so at once. Raises OSError."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.touch(mode, exist_ok=False)
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_secret_lines(path: str | Path, what: str) -> list[str]:
    """Return the lines of a file of secrets that are not blank, stripped. Warn if all users may read the file. Raises
    ConfigError if a line is not printable ASCII."""
    warn_if_all_may_read(path)
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path, what).splitlines(), 1)]
    for number, line in lines:
        require_secret(line, f"{what} {path}, line {number}")
    return [line for _, line in lines if line]


def read_token_file(path: str | Path, what: str) -> str:
    """Return the token of a file, in which ``#`` begins a comment line. Raises ConfigError, which quotes no token."""
    words = [line.split() for line in read_secret_lines(path, what) if not line.startswith("#")]
    if not words:
        raise ConfigError(f"{what} {path} is empty")
    if len(words) > 1 or len(words[0]) > 1:
        raise ConfigError(
            f"{what} {path} has more than one word: the store's file has lines ROLE TOKEN; write one of its tokens, "
            "without the role, to a file of your own"
        )
    return words[0][0]


def require_secret(secret: str, where: str) -> str:
    """Return ``secret``. Raises ConfigError, which does not quote it, unless it is printable ASCII, or tabs."""
    if not (secret.isascii() and secret.replace("\t", "").isprintable()):
        raise ConfigError(f"{where}: expected printable ASCII; it has other characters, perhaps invisible ones")
    return secret


def environment_secret(name: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a secret in the environment without white space around it, such as the end of the line that Kubernetes
    passes on. None if it is not set, or empty."""
    return environ.get(name, "").strip() or None


def warn_if_all_may_read(path: str | Path) -> None:
    """Warn if every user of this machine may read a file that holds a secret. A group may: containers need that."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return  # whoever reads it says why that fails
    if stat.S_ISREG(mode) and mode & stat.S_IROTH:
        logger.warning("kvfetch: all users of this machine may read the secret in %s; type: chmod 600 %s", path, path)


LOOK_EVERY_S = 1.0  # at files that may have changed


class FreshFiles(Generic[T]):
    """What some files say, read again when they change: tokens, certificates. Thread-safe, as `value` is replaced as a
    whole. Files that cannot be used, such as a certificate whose new key is not there yet, leave the value as it is,
    and are tried again at each look."""

    def __init__(self, what: str, paths: Sequence[str | Path], read: Callable[[], T]) -> None:
        """Read the files. ``what`` is for the log. ``read`` raises ConfigError, and so does this."""
        self._what, self._paths, self._read = what, list(dict.fromkeys(paths)), read
        self._next_s = 0.0
        self._stamp: object = self._look()
        self.value = read()

    def reload(self, *, if_changed: bool = False) -> None:
        """Read the files, and say in the log what came of it."""
        stamp = self._look()  # before reading: what changes meanwhile is read at the next look
        if if_changed and stamp == self._stamp:
            return
        self._stamp = None
        where = ", ".join(map(str, self._paths))
        try:
            self.value = self._read()
        except ConfigError as e:
            _limited.log(logging.ERROR, f"{self._what} {where}", f"kvfetch: keeping the old {self._what}: {e}")
        else:
            self._stamp = stamp
            logger.info("kvfetch: read the %s again from %s", self._what, where)

    async def follow(self) -> None:
        """Read the files on another thread if they have changed, unless somebody looked less than a second ago."""
        if self._paths and (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + LOOK_EVERY_S
            await asyncio.to_thread(self.reload, if_changed=True)

    async def watch(self) -> None:
        """Do so until this is cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.reload, if_changed=True)

    def _look(self) -> list[tuple[int, ...]]:
        return [_stamp_of(path) for path in self._paths]


def _stamp_of(path: str | Path) -> tuple[int, ...]:
    """Return what changes with a file, or with the one that a link leads to; nothing if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_mtime_ns, status.st_size, status.st_ino
