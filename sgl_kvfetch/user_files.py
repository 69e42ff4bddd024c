"""Text files that users write, and secrets in files and in the environment.

Editors put characters into files that nobody sees: a byte order mark at the start, spaces of no width after a copy from
a web page. In a secret, they would only show as a refusal elsewhere.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from sgl_kvfetch.errors import ConfigError

logger = logging.getLogger(__name__)

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


def read_secret_lines(path: str | Path, what: str) -> list[str]:
    """Return the lines of a file of secrets that are not blank, stripped. Warn if all users may read the file. Raises
    ConfigError if a line is not printable ASCII."""
    warn_if_all_may_read(path)
    lines = [(number, line.strip()) for number, line in enumerate(read_text(path, what).splitlines(), 1)]
    for number, line in lines:
        require_secret(line, f"{what} {path}, line {number}")
    return [line for _, line in lines if line]


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
