"""What a config says of its stores, and whether that can be used.

A module of its own, because the engine imports it before SGLang serves, when nothing may be counted yet: see `metrics`.
"""

from __future__ import annotations

from sgl_kvfetch.codec import read_encryption_keys, read_manifest_keys
from sgl_kvfetch.directory import open_store
from sgl_kvfetch.plane.config import KVFetchConfig
from sgl_kvfetch.stores import HttpOptions, S3Options, TlsFiles


def check_files(config: KVFetchConfig) -> None:
    """Check the files and the keys that a config names for its stores. Does no network I/O. Raises ConfigError."""
    read_manifest_keys(config.manifest_key_file)
    read_encryption_keys(config.encryption_key_file)
    tls = tls_files(config)
    tls.context()
    if config.store.startswith("s3:"):
        open_store(config.store, options=HttpOptions(tls=tls), s3=s3_options(config))


def tls_files(config: KVFetchConfig) -> TlsFiles:
    return TlsFiles(config.tls.ca_file, config.tls.cert_file, config.tls.key_file)


def s3_options(config: KVFetchConfig) -> S3Options:
    s3, index = config.s3 or {}, config.index
    return S3Options(s3) if index is None else S3Options(s3, index.url, index.ttl_s)
