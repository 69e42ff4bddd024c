"""The options and arguments that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sgl_kvfetch.errors import ConfigError

if TYPE_CHECKING:
    from sgl_kvfetch.container.signing import ManifestKeys

TOKEN_ENV = "KVFETCH_TOKEN"  # also in sgl_kvfetch.config, which is slow to import because it needs torch


def option(metavar: str | None, text: str, *names: str, **settings: Any) -> Any:
    """Return an option for `Annotated`. ``text`` is its help; flags have no ``metavar``."""
    return typer.Option(*names, metavar=metavar, help=text, **settings)


def json_flag(shape: str) -> Any:
    """Return the flag ``--json`` of a command that prints ``shape``."""
    return option(None, f"Print JSON, for programs: {shape}.", "--json")


STORE_HELP = "http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory."
PART_HELP = (
    f"A store, or a part of it. A store is {STORE_HELP} STORE#PREFIX is a part, where PREFIX is the start of object "
    "names, such as a namespace that kvfetch inspect shows."
)
TARGET_HELP = f"{PART_HELP} It may also be a manifest or data file (*.kvm, *.kvd)."
INDEX_HELP = (
    "redis://HOST:PORT/DB, rediss://... or redis+cluster://... Other users of this machine can see it: a password "
    "belongs into the environment, as KVFETCH_INDEX_PASSWORD."
)

StoreArgument = Annotated[str, typer.Argument(metavar="STORE", help=STORE_HELP)]
PartArgument = Annotated[str, typer.Argument(metavar="STORE", help=PART_HELP)]
TargetArgument = Annotated[str, typer.Argument(metavar="TARGET", help=TARGET_HELP)]
TokenOption = Annotated[
    str | None,
    option(
        "TOKEN",
        "Bearer token of an HTTP store. Other users of this machine can see it: prefer --token-file, "
        f"or {TOKEN_ENV} in the environment.",
    ),
]
TokenFileOption = Annotated[Path | None, option("FILE", "A file that holds the token.")]
KeyFileOption = Annotated[Path | None, option("FILE", "The key that manifests of this store are signed with.")]
IndexOption = Annotated[str | None, option("URL", f"The index of an S3 store: {INDEX_HELP}")]
DryRunOption = Annotated[bool, option(None, "Say what would be deleted or written, and change nothing.", "--dry-run")]


def read_token(token: str | None, token_file: Path | None) -> str | None:
    """Return the token from the command line, or else from the environment, or None. Raises ConfigError."""
    if token is not None and token_file is not None:
        raise ConfigError("give either --token or --token-file, not both")
    if token_file is not None:
        try:
            token = token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"--token-file {token_file}: {e}") from e
        if not token:
            raise ConfigError(f"--token-file {token_file} is empty")
    if token == "":
        raise ConfigError("--token is empty")
    return token or os.environ.get(TOKEN_ENV) or None


def read_keys(manifest_key_file: Path | None) -> ManifestKeys | None:
    """Return the keys in the file, or None without a file. Raises ConfigError."""
    from sgl_kvfetch.container.signing import read_manifest_keys

    return None if manifest_key_file is None else read_manifest_keys(manifest_key_file)
