"""The TARGET argument: a store, a part of one, or files on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sgl_kvfetch.cli.loose import LooseSegment
from sgl_kvfetch.errors import ConfigError, FormatError
from sgl_kvfetch.keys import DATA_SUFFIX, MANIFEST_SUFFIX, parse_object_name
from sgl_kvfetch.stores.listing import Objects
from sgl_kvfetch.stores.open import open_store


@dataclass(frozen=True, slots=True)
class Target:
    """Objects with the name prefix ``prefix``. Messages call them ``label``."""

    objects: Objects
    prefix: str
    label: str


def open_target(text: str, token: str | None) -> Target:
    """Parse a TARGET argument and open it. Raises ConfigError, and FormatError for an invalid manifest file."""
    if "://" in text:
        url, _, prefix = text.partition("#")
        return _store_at(url, prefix, token)
    path = Path(text)
    if path.is_file():
        return _file_at(path)
    folder, _, prefix = (text, "", "") if path.is_dir() else text.partition("#")
    if not Path(folder).is_dir():
        raise ConfigError(f"{folder!r} is neither a file, a directory nor a store's URL")
    return _store_at(Path(folder).resolve().as_uri(), prefix, None)


def _store_at(url: str, prefix: str, token: str | None) -> Target:
    scheme = urlsplit(url).scheme
    if scheme == "file" and not Path(unquote(urlsplit(url).path)).is_dir():
        raise ConfigError(f"{url} is not a directory")  # or a typo would look like an empty store without errors
    store = open_store(url, token=token if scheme in ("http", "https") else None)
    return Target(store, _as_prefix(prefix), f"{url}#{prefix}" if prefix else url)


def _as_prefix(text: str) -> str:
    """Return the segment's name if ``text`` is the full name of its manifest or data, or else ``text``."""
    try:
        return parse_object_name(text).segment.stem
    except FormatError:
        return text


def _file_at(path: Path) -> Target:
    if path.suffix not in (MANIFEST_SUFFIX, DATA_SUFFIX):
        raise ConfigError(f"{str(path)!r} is neither a manifest (*{MANIFEST_SUFFIX}) nor data (*{DATA_SUFFIX})")
    path = path.resolve()
    try:
        stem = parse_object_name(f"{path.parent.name}/{path.name}").segment.stem
    except FormatError:
        loose = LooseSegment(path)
        return Target(loose, loose.stem, str(path))
    return Target(open_store(path.parent.parent.as_uri()), stem, str(path))
