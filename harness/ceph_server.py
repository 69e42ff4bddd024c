"""Runs a Ceph cluster of one node with its object gateway, as child processes on loopback, with all data in memory."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

from harness.children import start_child
from harness.engine import free_port
from harness.s3_server import ACCESS_KEY, SECRET_KEY, make_bucket, s3_config
from harness.waiting import WAIT_S, polls

_PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
HAS_CEPH = all(shutil.which(program) for program in _PROGRAMS)
CEPH_MISSING = "needs Ceph (Debian's packages ceph-mon, ceph-osd and radosgw)"

_CLUSTER_ID = "6f6d1c2a-2f2f-4c5e-9c58-000000000001"
_DISK_ID = "6f6d1c2a-2f2f-4c5e-9c58-000000000002"

# Without authentication inside the cluster, radosgw must be told not to encrypt: it insists on that by default. The
# monitor agrees with itself at once instead of collecting changes for a second, which saves 20 s of making pools.
_CONFIG = """
[global]
fsid = {cluster_id}
mon_host = {monitor}
public_addr = 127.0.0.1
ms_bind_msgr1 = false
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
mon_data = {folder}/mon
osd_data = {folder}/osd
osd_objectstore = memstore
memstore_device_bytes = 4294967296
osd_crush_chooseleaf_type = 0
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pg_autoscale_mode = off
mon_allow_pool_size_one = true
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_data = {folder}
run_dir = {folder}
crash_dir = {folder}
admin_socket =
log_file =
log_to_stderr = true
err_to_stderr = true
debug_rocksdb = 0
"""


class CephProcess:
    """A context manager; when it is entered, the gateway answers and has an empty bucket. Entering raises RuntimeError,
    with what all parts print, if it fails."""

    def __init__(self) -> None:
        self._port = free_port()
        self.config = s3_config(f"http://127.0.0.1:{self._port}")
        self._folder = tempfile.TemporaryDirectory(prefix="ceph-")
        self._log_path = Path(self._folder.name, "log")
        self._env = os.environ | {"CEPH_CONF": str(Path(self._folder.name, "ceph.conf"))}
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        try:
            self._start_cluster()
            gateway = self._spawn("radosgw", "-f", "-n", "client.admin")
            for _ in polls():
                assert gateway.poll() is None
                with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                    break
            make_bucket(self.config)
        except BaseException as e:
            said = self._log_path.read_text(errors="replace").splitlines()[-60:]
            self.__exit__()
            raise RuntimeError("\n".join(("Ceph did not start:", *said))) from e
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start_cluster(self) -> None:
        assert HAS_CEPH, CEPH_MISSING
        folder = Path(self._folder.name)
        monitor = f"v2:127.0.0.1:{free_port()}"
        config = _CONFIG.format(cluster_id=_CLUSTER_ID, folder=folder, monitor=monitor, port=self._port)
        (folder / "ceph.conf").write_text(config)
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        map_path = str(folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", _CLUSTER_ID, "--addv", "a", f"[{monitor}]", map_path)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_path)
        self._spawn("ceph-mon", "-f", "-i", "a")
        self._run("ceph", "osd", "new", _DISK_ID)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", _DISK_ID)
        self._spawn("ceph-osd", "-f", "-i", "0")
        keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY]
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)

    def _run(self, *command: str) -> None:
        with self._log_path.open("ab") as log:
            subprocess.run(command, env=self._env, stdout=log, stderr=log, timeout=WAIT_S, check=True)

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            process = start_child(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._processes.append(process)
        return process
