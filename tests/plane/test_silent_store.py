"""A data plane whose store accepts connections, and is silent in the TLS handshake: one dead backend of a balancer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme

from harness.store_process import StoreProcess
from harness.waiting import WAIT_S, wait_until
from sgl_kvfetch.engine.data_plane import DataPlane
from sgl_kvfetch.protocol.arena import StagedValues
from tests.engine.test_data_plane import Launcher, all_of, open_plane, store
from tests.segments import page_hashes

pytestmark = pytest.mark.process
NUM_PAGES = 8


class Balancer:
    """Passes connections on to a server, or takes them and says nothing."""

    def __init__(self, port: int) -> None:
        self._to = "127.0.0.1", port
        self._kept: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._num_passed: float = float("inf")  # connections that it still passes on
        self.num_silent = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                taken, _ = self._listener.accept()
                self._kept.append(taken)
                self._num_passed -= 1
                if self._num_passed < 0:
                    self.num_silent += 1
                    continue
                server = socket.create_connection(self._to)
                self._kept.append(server)
                for pair in ((taken, server), (server, taken)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, come_from: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := come_from.recv(1 << 16):
                to.sendall(data)
        self._end((come_from, to))

    def be_silent(self, num_passed: int) -> None:
        """End all connections, and pass so many on that come after them."""
        self._num_passed = num_passed
        self._end(self._kept)

    def recover(self) -> None:
        self._num_passed = float("inf")

    def _end(self, sockets: Sequence[socket.socket]) -> None:
        for each in sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end((self._listener, *self._kept))
        for each in (self._listener, *self._kept):
            each.close()


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[StoreProcess, Path]]:
    folder = tmp_path_factory.mktemp("tls")
    authority, ca, server = trustme.CA(), folder / "ca.pem", folder / "server.pem"
    authority.cert_pem.write_to_path(str(ca))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(server))
    args = "--tls-cert", str(server), "--tls-key", str(server)
    with StoreProcess(folder / "store", extra_args=args, ca_file=ca) as process:
        yield process, ca


def fetched(plane: DataPlane, mode: str, hashes: list[bytes], timeout_s: float) -> int:
    """Return how many pages were brought."""
    if mode == "host":
        return plane.fetch(all_of(hashes, timeout_s)).over.result(WAIT_S).num_pages
    got: list[StagedValues] = []
    work = plane.stage(hashes, got.append)

    def is_there() -> bool:
        plane.step()
        return bool(got)

    wait_until(is_there)
    plane.unstage(work)
    return got[0].num_pages


@pytest.mark.parametrize("mode", ["host", "device"])
def test_a_fetch_is_answered_and_the_next_one_is_well(backend: tuple[StoreProcess, Path], mode: str) -> None:
    process, ca = backend
    balancer, launcher = Balancer(process.port), Launcher()
    url, tls = f"https://127.0.0.1:{balancer.port}", {"ca_file": str(ca)}
    staging_bytes = 64 << 20 if mode == "device" else 0
    plane = open_plane(url, launcher, staging_bytes=staging_bytes, tls=tls, fetch_timeout_s=2, lookup_timeout_s=5)
    try:
        hashes = page_hashes(NUM_PAGES, mode)
        store(plane, hashes)
        balancer.be_silent(1 if mode == "device" else 0)  # to reads; in device mode, a lookup goes before them
        assert fetched(plane, mode, hashes, 2.0) == 0
        assert balancer.num_silent > 0
        balancer.recover()
        wait_until(lambda: fetched(plane, mode, hashes, WAIT_S) == NUM_PAGES)  # the store was left alone for a second
    finally:
        plane.close()
        are_over = [each.join(WAIT_S) for each in launcher.started]  # they may connect until then
        balancer.close()
    assert all(are_over)
