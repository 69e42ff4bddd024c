"""Serve OpenStack Swift's S3 API: ``python -m harness.swift_app FOLDER PORT ACCESS_KEY SECRET_KEY``.

The account, container, object and proxy servers run in one process, as in Swift's own functional tests. ``FOLDER`` is
an empty folder on a file system with extended attributes, which Swift keeps its metadata in. ``ACCESS_KEY`` is
ACCOUNT:USER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import eventlet
from eventlet import wsgi
from swift.common.utils import monkey_patch, set_swift_dir

_SWIFT_CONF = """
[swift-hash]
swift_hash_path_suffix = x
[storage-policy:0]
name = one-copy
default = yes
"""

_PROXY_CONF = """
[DEFAULT]
swift_dir = {folder}
[pipeline:main]
pipeline = catch_errors s3api tempauth slo proxy-server
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_{user} = {secret_key} .admin
[filter:slo]
use = egg:swift#slo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""


def serve(folder: Path, port: int, access_key: str, secret_key: str) -> None:
    (folder / "swift.conf").write_text(_SWIFT_CONF)
    set_swift_dir(str(folder))
    from swift.account.server import AccountController
    from swift.common.http_protocol import SwiftHttpProtocol
    from swift.common.ring.ring import RingData
    from swift.common.wsgi import loadapp
    from swift.container.server import ContainerController
    from swift.obj.server import ObjectController

    def serve_on(sock: Any, app: Any) -> None:
        # S3 clients want "ETag", not "Etag".
        wsgi.server(sock, app, protocol=SwiftHttpProtocol, capitalize_response_headers=False, log_output=False)

    (folder / "disks" / "one").mkdir(parents=True)
    conf = {"devices": str(folder / "disks"), "mount_check": "false", "swift_dir": str(folder)}
    for name, controller in (
        ("account", AccountController),
        ("container", ContainerController),
        ("object", ObjectController),
    ):
        sock = eventlet.listen(("127.0.0.1", 0))
        eventlet.spawn(serve_on, sock, controller(conf))
        disk = {"id": 0, "region": 1, "zone": 1, "device": "one", "ip": "127.0.0.1", "port": sock.getsockname()[1]}
        RingData([[0, 0]], [disk], part_shift=31).save(str(folder / f"{name}.ring.gz"))
    user = access_key.replace(":", "_")
    (folder / "proxy.conf").write_text(_PROXY_CONF.format(folder=folder, user=user, secret_key=secret_key))
    serve_on(eventlet.listen(("127.0.0.1", port)), loadapp(str(folder / "proxy.conf")))


if __name__ == "__main__":
    monkey_patch()
    serve(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
