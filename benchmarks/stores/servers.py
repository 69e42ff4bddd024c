"""Starts the servers, and tells what a SGLang server's config would be for each kind of store."""

from __future__ import annotations

import multiprocessing
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.stores.presigned import open_presigned
from benchmarks.stores.relay import Relay
from harness.redis_server import REDIS, REDIS_MISSING, RedisProcess
from harness.s3_server import BUCKET, running_s3_server
from harness.store_process import StoreProcess
from sgl_kvfetch.plane.config import KVFetchConfig, parse_config
from sgl_kvfetch.plane.store import open_configured_store
from sgl_kvfetch.stores.base import Store

KINDS = ("kvfetch serve", "S3", "S3, presigned reads", "S3 with index", "disk before S3 with index")
_CAPACITY = "64GiB"  # of the disk tier, which holds one prefix


@dataclass(frozen=True)
class Servers:
    """Where servers listen: ``store`` (`kvfetch serve`), ``s3`` and ``index``. As hosts and ports."""

    addresses: Mapping[str, tuple[str, int]]
    bucket_url: str
    s3_config: Mapping[str, str]  # without the endpoint
    folder: Path  # for the disk tier

    def configs(self) -> dict[str, dict[str, Any]]:
        """Return the config of each kind of store."""
        urls = {name: f"http://{host}:{port}" for name, (host, port) in self.addresses.items()}
        s3 = {"store": self.bucket_url, "s3": {**self.s3_config, "endpoint": urls["s3"]}}
        indexed = {**s3, "index": {"url": urls["index"].replace("http", "redis")}}
        disk = {"path": str(self.folder / "disk"), "capacity": _CAPACITY}
        configs = ({"store": urls["store"]}, s3, s3, indexed, {**indexed, "local_cache": disk})
        return dict(zip(KINDS, configs, strict=True))

    def open(self, kind: str) -> Store:
        config = parse_config(self.configs()[kind], {})
        opened: Callable[[KVFetchConfig], Store] = open_presigned if "presigned" in kind else open_configured_store
        return opened(config)


@contextmanager
def running_servers(folder: Path, s3_endpoint: str | None, bucket: str) -> Iterator[Servers]:
    """Start all, but for S3 if its endpoint is given: then credentials are in the environment, and ``bucket`` exists.

    Objects get a new prefix.
    """
    if REDIS is None:
        raise SystemExit(REDIS_MISSING)
    with ExitStack() as stack:
        s3_config = {"region": os.environ.get("AWS_REGION", "us-east-1")}
        if s3_endpoint is None:
            s3_config, bucket = stack.enter_context(_moto()), BUCKET
            s3_endpoint = s3_config.pop("endpoint")
        s3 = urlsplit(s3_endpoint)
        if s3.scheme != "http" or not s3.hostname:
            raise SystemExit(f"{s3_endpoint} is not http://HOST:PORT: requests are not counted through TLS")
        index = stack.enter_context(RedisProcess())
        store = stack.enter_context(StoreProcess(folder / "store"))
        yield Servers(
            {
                "store": ("127.0.0.1", store.port),
                "s3": (s3.hostname, s3.port or 80),
                "index": ("127.0.0.1", index.port),
            },
            f"s3://{bucket}/benchmark-{secrets.token_hex(8)}",
            s3_config,
            folder,
        )


@contextmanager
def _moto() -> Iterator[dict[str, str]]:
    """Run moto in a process of its own, as it would compete with the client for the interpreter lock."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve_s3, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # so that its death ends what waits for it
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def _serve_s3(pipe: Connection) -> None:
    with running_s3_server() as s3:
        pipe.send(s3.config)
        pipe.recv()  # until it is killed


@contextmanager
def relayed(servers: Servers, rtt_s: float) -> Iterator[tuple[Servers, Mapping[str, Relay]]]:
    """Yield the same servers behind relays, and the relays."""
    with ExitStack() as stack:
        relays = {name: stack.enter_context(Relay(*address, rtt_s)) for name, address in servers.addresses.items()}
        addresses = {name: ("127.0.0.1", relay.port) for name, relay in relays.items()}
        yield Servers(addresses, servers.bucket_url, servers.s3_config, servers.folder), relays
