"""Runs a Ceph cluster of one node with its object gateway, as child processes on loopback, with all data in memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Self

from harness.children import start_child
from harness.engine import free_port
from harness.s3_server import ACCESS_KEY, SECRET_KEY, make_bucket, s3_config, wait_until_it_answers
from harness.waiting import WAIT_S

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
    """A context manager; when it is entered, the gateway answers and has an empty bucket.

    The cluster keeps its objects while the gateway is killed and started again. ``log_path`` has what all parts print.
    """

    def __init__(self) -> None:
        self.port = free_port()
        self.config = s3_config(f"http://127.0.0.1:{self.port}")
        self._folder = tempfile.TemporaryDirectory(prefix="ceph-")
        self.log_path = Path(self._folder.name, "log")
        self._env = os.environ | {"CEPH_CONF": str(Path(self._folder.name, "ceph.conf"))}
        self._cluster: list[subprocess.Popen[bytes]] = []
        self._gateway: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._start_cluster()
            self.start_gateway()
            make_bucket(self.config)
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()

    def _start_cluster(self) -> None:
        assert HAS_CEPH, CEPH_MISSING
        folder = Path(self._folder.name)
        monitor = f"v2:127.0.0.1:{free_port()}"
        config = _CONFIG.format(cluster_id=_CLUSTER_ID, folder=folder, monitor=monitor, port=self.port)
        (folder / "ceph.conf").write_text(config)
        for name in ("mon", "osd"):
            (folder / name).mkdir()
        map_path = str(folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", _CLUSTER_ID, "--addv", "a", f"[{monitor}]", map_path)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", map_path)
        self._cluster.append(self._spawn("ceph-mon", "-f", "-i", "a"))
        self._run("ceph", "osd", "new", _DISK_ID)
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", _DISK_ID)
        self._cluster.append(self._spawn("ceph-osd", "-f", "-i", "0"))
        keys = ["--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY]
        self._run("radosgw-admin", "user", "create", "--uid", "test", "--display-name", "test", *keys)

    def _run(self, *command: str) -> None:
        """Run ``command`` to its end. Raises RuntimeError, with the log, if it fails or hangs."""
        with self.log_path.open("ab") as log:
            try:
                subprocess.run(command, env=self._env, stdout=log, stderr=log, timeout=WAIT_S, check=True)
            except subprocess.SubprocessError as e:
                raise RuntimeError(f"{e}\n{self._log()}") from e

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with self.log_path.open("ab") as log:
            return start_child(command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_gateway(self) -> None:
        """Start the gateway, and wait until it answers. Raises RuntimeError, with the log, if it does not."""
        assert self._gateway is None, "already started"
        self._gateway = self._spawn("radosgw", "-f", "-n", "client.admin")
        if not wait_until_it_answers(self.config["endpoint"], self._gateway):
            self.kill_gateway()
            raise RuntimeError(f"radosgw did not start:\n{self._log()}")

    def kill_gateway(self) -> None:
        """Kill the gateway, as a crash would. Do nothing if it does not run."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            _kill(gateway)

    def _log(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-60:])

    def _kill(self) -> None:
        self.kill_gateway()
        for process in self._cluster:
            _kill(process)
        self._folder.cleanup()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
