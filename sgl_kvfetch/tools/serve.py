"""``kvfetch serve``: run the embedded store on this machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.tools.terminal import IndexOption, client_certificate, option, show_log
from sgl_kvfetch.user_files import TOKEN_ENV, environment_secret, parse_size

DEFAULT_PORT = 8700


def serve(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", file_okay=False, help="Where to keep objects; created if missing.")
    ],
    host: Annotated[str, option("ADDRESS", "Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, option("PORT", "Port to listen on; 0 picks a free one.", min=0, max=65535)] = DEFAULT_PORT,
    capacity: Annotated[
        str | None, option("SIZE", "Most bytes to store, such as 100GiB; then the least recently used is evicted.")
    ] = None,
    drop_levels: Annotated[
        int,
        option(
            "COUNT",
            "Levels (config key levels) that a segment loses before any is evicted; each makes the divergence about "
            "nine times as large.",
            min=0,
            max=3,
        ),
    ] = 0,
    token_file: Annotated[
        Path | None,
        option(
            "FILE",
            "A file with one token, or with lines ROLE TOKEN, where ROLE is read, write or admin. "
            "It is read again when it changes, and on SIGHUP. Without it, KVFETCH_TOKEN in the environment is a token.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, option("FILE", "PEM file with a certificate: speak TLS. Read again, as tokens are.")
    ] = None,
    tls_key: Annotated[Path | None, option("FILE", "PEM file with the certificate's key.")] = None,
    tls_client_ca: Annotated[
        Path | None, option("FILE", "PEM file with CAs: clients must have a certificate by one of them.")
    ] = None,
    upstream: Annotated[
        str | None,
        option(
            "URL",
            "A store to be in front of, http(s):// or s3://: what this one lacks is read from there and kept, what is "
            "written goes to both.",
        ),
    ] = None,
    upstream_token_file: Annotated[
        Path | None, option("FILE", "A file that holds the upstream's token. Read again, as tokens are.")
    ] = None,
    index: IndexOption = None,
    insecure: Annotated[bool, option(None, "Accept other hosts without a token.", "--insecure")] = False,
    max_connections: Annotated[
        int, option("COUNT", "Most open connections; further clients are told to retry later.")
    ] = 4096,
) -> None:
    """Serve a directory as a store, until Ctrl-C or SIGTERM.

    Examples:

        kvfetch serve /var/cache/kv --capacity 100GiB

        KVFETCH_TOKEN=secret kvfetch serve /var/cache/kv --host 0.0.0.0

        kvfetch serve /nvme/kv --capacity 200GiB --upstream http://STORE:8700
    """
    from sgl_kvfetch.server.config import ServerConfig
    from sgl_kvfetch.server.run import run_server

    cert, key = (None, None) if upstream is None else client_certificate()
    config = ServerConfig(
        root=directory,
        host=host,
        port=port,
        token=environment_secret(TOKEN_ENV) if token_file is None else None,
        token_file=token_file,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        insecure=insecure,
        upstream=upstream,
        upstream_token_file=upstream_token_file,
        upstream_index=index,
        tls_client_cert=cert,
        tls_client_key=key,
        capacity_bytes=parse_size(capacity) if capacity is not None else None,
        drop_levels=drop_levels,
        max_connections=max_connections,
    )
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(f"cannot make {directory}: {e.strerror or e}") from e
    # Show INFO: the server logs the address that it listens on.
    show_log(logging.INFO, logging.StreamHandler(), with_time=True)
    run_server(config)
