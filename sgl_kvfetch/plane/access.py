"""What opens the store that a config names: its keys and its token, which may be replaced at any time, TLS files, and
the options of S3.

``python -m sgl_kvfetch.plane.access`` checks the config on its standard input for SGLang's process, which opens no
store. It imports no torch, since each launch waits for it.
"""

from __future__ import annotations

import json
import sys
from functools import partial

from sgl_kvfetch.codec import StoreKeys
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.protocol import KVFetchConfig
from sgl_kvfetch.stores import AdminStore, HttpOptions, S3Options, TlsFiles, Token, open_remote, takes_token
from sgl_kvfetch.user_files import TOKEN_ENV, FreshFiles, environment_secret, read_token_file

WAIT_S = 10.0  # for an answer about profiles; a profile itself may take longer, by its size
CONNECT_S = 5.0  # limit for one attempt to connect to the store


def store_keys(config: KVFetchConfig) -> StoreKeys:
    """Read the keys of the store. Raises ConfigError."""
    return StoreKeys.read(config.key_file)


def fresh_keys(config: KVFetchConfig) -> FreshFiles[StoreKeys]:
    """Read the keys of the store, and again when their file changes. Raises ConfigError."""
    return FreshFiles("keys", () if config.key_file is None else (config.key_file,), partial(store_keys, config))


def store_token(config: KVFetchConfig) -> Token | None:
    """Return what the store is shown. Raises ConfigError if the token's file cannot be used."""
    if (path := config.token_file) is None:
        return environment_secret(TOKEN_ENV) if takes_token(config.store) else None
    return FreshFiles("token", (path,), partial(read_token_file, path, "token_file"))


def tls_files(config: KVFetchConfig) -> TlsFiles:
    return TlsFiles(config.tls.ca_file, config.tls.cert_file, config.tls.key_file)


def s3_options(config: KVFetchConfig) -> S3Options:
    return S3Options(config.s3 or {}, config.index)


def open_profile_store(config: KVFetchConfig) -> AdminStore:
    """Open the store, for its profiles. Does no I/O but for the token's file. Raises ConfigError."""
    options = HttpOptions(timeout_s=WAIT_S, connect_timeout_s=CONNECT_S, tls=tls_files(config))
    return open_remote(config.store, token=store_token(config), options=options, s3=s3_options(config))


def check_access(config: KVFetchConfig) -> None:
    """Check what a config names for its store. Does no network I/O. Raises ConfigError."""
    store_keys(config)
    tls_files(config).context()
    open_profile_store(config)


if __name__ == "__main__":
    try:
        check_access(KVFetchConfig.model_validate(json.load(sys.stdin)))
    except ConfigError as e:
        sys.exit(str(e))
