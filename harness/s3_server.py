"""Runs moto's S3 server in a thread of this process, on a free loopback port."""

from __future__ import annotations

import logging
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Lock
from typing import Any, cast

import obstore
from moto.server import ThreadedMotoServer

from harness.waiting import WAIT_S, polls

BUCKET = "kv-cache"
ACCESS_KEY, SECRET_KEY = "test:test", "test"  # Swift wants a colon


@dataclass
class Traffic:
    """Bytes of bodies, over all requests but those for lists."""

    received_bytes: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True)
class S3Server:
    host: str
    port: int
    traffic: Traffic

    @property
    def config(self) -> dict[str, str]:
        """The keys of obstore's S3 config that reach this server."""
        return s3_config(f"http://{self.host}:{self.port}")

    def make_bucket(self, name: str = BUCKET) -> None:
        make_bucket(self.config, name)

    def reset(self) -> None:
        """Delete all buckets."""
        request = urllib.request.Request(f"http://{self.host}:{self.port}/moto-api/reset", method="POST")
        urllib.request.urlopen(request, timeout=60).close()


def s3_config(endpoint: str) -> dict[str, str]:
    keys = {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    return {"endpoint": endpoint, "region": "us-east-1", **keys}


def open_bucket(config: dict[str, str], name: str = BUCKET) -> obstore.store.S3Store:
    """Return a client of a bucket, with which a test looks into it."""
    return obstore.store.S3Store(name, config=cast(Any, config), client_options={"allow_http": True})


def make_bucket(config: dict[str, str], name: str = BUCKET) -> None:
    """Make a bucket on the server that ``config`` leads to."""
    url = obstore.sign(open_bucket(config, name), "PUT", "", timedelta(minutes=10))
    urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=60).close()


def wait_until_it_answers(endpoint: str, process: subprocess.Popen[bytes]) -> bool:
    """Return True when the server answers at ``endpoint``, with any status. Return False if its ``process`` ends, or
    does not answer in time."""
    for _ in polls():
        if process.poll() is not None:
            return False
        try:
            urllib.request.urlopen(endpoint, timeout=WAIT_S).close()
        except urllib.error.HTTPError as e:
            e.close()  # an answer
        except OSError:
            continue
        return True
    return False


@contextmanager
def running_s3_server() -> Iterator[S3Server]:
    """Yield a server with an empty bucket ``BUCKET``."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it logs each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    traffic = Traffic()
    server._server.app = _counting(_conditional_writes_in_turn(server._server.app), traffic)
    try:
        host, port = server.get_host_and_port()
        s3 = S3Server(host, port, traffic)
        s3.reset()  # all moto's servers of a process have the same buckets
        s3.make_bucket()
        yield s3
    finally:
        server.stop()


def _conditional_writes_in_turn(app: Any) -> Any:
    """Let requests with `If-Match` wait for each other. moto compares first and writes later, each request on a thread
    of its own, so it would let two of them through."""
    lock = Lock()

    def run(environ: dict[str, Any], start_response: Any) -> Any:
        if "HTTP_IF_MATCH" not in environ:
            return app(environ, start_response)
        with lock:
            return app(environ, start_response)

    return run


def _counting(app: Any, traffic: Traffic) -> Any:
    def run(environ: dict[str, Any], start_response: Any) -> Any:
        traffic.received_bytes += int(environ.get("CONTENT_LENGTH") or 0)
        is_list = "list-type" in environ.get("QUERY_STRING", "")
        for part in app(environ, start_response):
            traffic.sent_bytes += 0 if is_list else len(part)
            yield part

    return run
