"""Runs ``redis-server`` as a child process on a free loopback port, without files of its own. Two can fail over."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

import redis

from harness.children import start_child
from harness.engine import free_port
from harness.streams import StreamServer, relay
from harness.waiting import polls

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
REDIS_MISSING = "needs redis-server (Debian's package redis-server, or valkey-server)"


class RedisProcess:
    """A context manager; the server answers when it is entered. With ``client`` a test looks into it."""

    def __init__(self, *, password: str | None = None, cluster: bool = False) -> None:
        self.port = free_port()
        self.url = f"redis{'+cluster' if cluster else ''}://127.0.0.1:{self.port}"
        self.client: Any = redis.Redis(port=self.port, password=password)
        self._args = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._args += ["--repl-diskless-sync-delay", "0"]  # or a replica waits 5 s for others
        self._args += ["--requirepass", password] if password else []
        self._is_cluster = cluster
        self._args += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())] if cluster else []
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.client.close()
        self._folder.cleanup()

    def start(self) -> None:
        """Start an empty server, and wait until it answers. Raises RuntimeError if it does not."""
        Path(self._folder.name, "nodes.conf").unlink(missing_ok=True)  # which a killed server of a cluster leaves
        assert REDIS is not None, REDIS_MISSING
        assert self._process is None, "already started"
        command = [REDIS, *self._args, "--dir", self._folder.name]
        self._process = start_child(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._wait_for(self.client.ping)
        if self._is_cluster:
            self.client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            self._wait_for(lambda: b"cluster_state:ok" in self.client.execute_command("CLUSTER", "INFO"))

    def replicate(self, primary: RedisProcess) -> None:
        """Become a replica of ``primary``, and wait until all its data are here."""
        self.client.execute_command("REPLICAOF", "127.0.0.1", primary.port)
        self._wait_for(lambda: self.client.info("replication")["master_link_status"] == "up")

    def promote(self) -> None:
        """Become a primary, with the data that are here."""
        self.client.execute_command("REPLICAOF", "NO", "ONE")

    def _wait_for(self, condition: Any) -> None:
        assert self._process is not None
        for _ in polls():
            if self._process.poll() is not None:
                break
            with contextlib.suppress(redis.ConnectionError):
                if condition():
                    return
        self.kill()
        raise RuntimeError("redis-server did not start")

    def kill(self) -> None:
        """Kill the server, as a crash would. Do nothing if it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def fail_over(primary: RedisProcess, replica: RedisProcess) -> None:
    """Exchange the roles of both servers without losing a write. Both keep running."""

    def sent_and_received() -> set[int]:  # bytes of writes
        return {each.client.info("replication")["master_repl_offset"] for each in (primary, replica)}

    replica._wait_for(lambda: len(sent_and_received()) == 1)
    replica.promote()
    primary.replicate(replica)


class RedisService(StreamServer):
    """A loopback address that leads each new connection to one server, and leaves open connections where they are, as a
    Kubernetes Service or a managed Redis's primary endpoint does."""

    def __init__(self, target: RedisProcess) -> None:
        super().__init__()
        self.target = target

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await relay("127.0.0.1", self.target.port, reader, writer)
