"""Options that several commands share."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from sgl_kvfetch.codec import ManifestKeys, read_manifest_keys
from sgl_kvfetch.errors import ConfigError

TOKEN_ENV = "KVFETCH_TOKEN"  # also in sgl_kvfetch.plane.config, which is slow to import because it needs torch

TARGET_HELP = (
    "What to look at: a store (http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory), "
    "a part of it (STORE#PREFIX, where PREFIX is the start of object names: a namespace or a segment), "
    "or a manifest or data file (*.kvm, *.kvd)."
)

TokenOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOKEN",
        help=f"Bearer token of an HTTP store. Other users of this machine can see it: prefer --token-file, "
        f"or {TOKEN_ENV} in the environment.",
    ),
]
TokenFileOption = Annotated[Path | None, typer.Option(metavar="FILE", help="A file that holds the token.")]
ManifestKeyFileOption = Annotated[
    Path | None,
    typer.Option("--manifest-key-file", metavar="FILE", help="The key that manifests of this store are signed with."),
]
INDEX_HELP = (
    "redis://HOST:PORT/DB, rediss://... or redis+cluster://... Other users of this machine can see it: a password "
    "belongs into the environment, as KVFETCH_INDEX_PASSWORD."
)
IndexOption = Annotated[
    str | None, typer.Option("--index", metavar="URL", help=f"The index of an S3 store: {INDEX_HELP}")
]
INDEX_TIMEOUT_S = 30.0  # commands can wait longer than servers
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Say what would be deleted or written, and change nothing.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


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
    return None if manifest_key_file is None else read_manifest_keys(manifest_key_file)


def print_json(value: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without markup. If the output is not a terminal, lines are 200 columns wide, for long names."""
    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = 200
    return console
