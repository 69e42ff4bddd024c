"""``kvfetch serve``: the embedded store on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from sgl_kvfetch.cli.options import TOKEN_ENV, TokenFileOption, read_token
from sgl_kvfetch.cli.units import parse_size
from sgl_kvfetch.errors import ConfigError

DEFAULT_PORT = 8700


def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", file_okay=False, help="Where the objects lie; made if it is missing.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")] = DEFAULT_PORT,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Room for objects, as in 100GiB. Beyond it the least recently used segments go. Default: no limit.",
            show_default=False,
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            help=f"Bearer token that clients must send. Other users of this machine can see it: prefer --token-file, "
            f"or {TOKEN_ENV} in the environment.",
            show_default=False,
        ),
    ] = None,
    token_file: TokenFileOption = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Let other hosts in without a token.")] = False,
    orphan_age_s: Annotated[
        float, typer.Option("--orphan-age", metavar="SECONDS", help="Age at which unfinished writes are removed.")
    ] = 900.0,
    max_object: Annotated[str, typer.Option(metavar="SIZE", help="Largest object that is taken.")] = "4GiB",
    max_uploads: Annotated[
        int, typer.Option(metavar="COUNT", help="Uploads at the same time; beyond them clients are asked to wait.")
    ] = 64,
    idle_timeout_s: Annotated[
        float,
        typer.Option("--idle-timeout", metavar="SECONDS", help="Give up uploads that bring less than a MiB in it."),
    ] = 30.0,
    link_gbps: Annotated[
        str | None,
        typer.Option(
            metavar="GBPS[,GBPS...]",
            help="Send no faster than this many 1e9 bits a second, all clients together: to try out a slow network. "
            "Of several, one a second, over and over.",
            show_default=False,
        ),
    ] = None,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="How long to wait for open requests when stopping.")
    ] = 10.0,
) -> None:
    """Serve a directory as a store, until Ctrl-C or SIGTERM.

    Examples:

        kvfetch serve /var/cache/kv --capacity 100GiB

        KVFETCH_TOKEN=secret kvfetch serve /var/cache/kv --host 0.0.0.0
    """
    from sgl_kvfetch.server import ServerConfig, run_server

    config = ServerConfig(
        root=directory,
        host=host,
        port=port,
        token=read_token(token, token_file),
        insecure=insecure,
        capacity_bytes=parse_size(capacity) if capacity is not None else None,
        max_body_bytes=parse_size(max_object),
        max_uploads=max_uploads,
        idle_timeout_s=idle_timeout_s,
        orphan_age_s=orphan_age_s,
        grace_s=grace_s,
        link_gbps=_parse_gbps(link_gbps),
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot make {directory}: {e.strerror or e}") from e
    # The server logs where it listens.
    logging.basicConfig(level=logging.INFO, format="kvfetch: %(message)s")
    run_server(config)


def _parse_gbps(text: str | None) -> tuple[float, ...] | None:
    """Raises ConfigError."""
    try:
        return tuple(float(part) for part in text.split(",")) if text else None
    except ValueError as e:
        raise ConfigError(f"--link-gbps {text!r}; expected numbers with commas between them, as in 1 or 6,3,4") from e
