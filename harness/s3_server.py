"""Runs moto's S3 server in a thread of this process, on a free loopback port."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import obstore
from moto.server import ThreadedMotoServer

BUCKET = "kv-cache"
ACCESS_KEY, SECRET_KEY = "test:test", "test"  # Swift wants a colon


@dataclass(frozen=True, slots=True)
class S3Server:
    host: str
    port: int

    @property
    def config(self) -> dict[str, str]:
        """The keys of obstore's S3 config that reach this server."""
        return s3_config(f"http://{self.host}:{self.port}")

    def make_bucket(self) -> None:
        make_bucket(self.config)

    def reset(self) -> None:
        """Delete all buckets."""
        request = urllib.request.Request(f"http://{self.host}:{self.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=60).close()


def s3_config(endpoint: str) -> dict[str, str]:
    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    return {"endpoint": endpoint, "region": "us-east-1", **keys}


def open_bucket(config: dict[str, str]) -> obstore.store.S3Store:
    """Return a client of the bucket, with which a test looks into it."""
    return obstore.store.S3Store(BUCKET, config=cast(Any, config), client_options={"allow_http": True})


def make_bucket(config: dict[str, str]) -> None:
    """Make the bucket on the server that ``config`` leads to."""
    url = obstore.sign(open_bucket(config), "PUT", "", timedelta(minutes=10))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Yield a server with an empty bucket ``BUCKET``."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    server._server.app = _in_turns(server._server.app)
    s3 = S3Server(*server.get_host_and_port())
    try:
        s3.reset()  # all moto's servers of a process have the same buckets
        s3.make_bucket()
        yield s3
    finally:
        server.stop()


def _in_turns(app: Any) -> Any:
    """Let requests with `If-Match` wait for each other: moto compares first and writes later, each request on a thread
    of its own, so it would let two of them through."""
    writing = Lock()

    def run(environ: dict[str, Any], start_response: Any) -> Any:
        with writing if "HTTP_IF_MATCH" in environ else nullcontext():
            return app(environ, start_response)

    return run
