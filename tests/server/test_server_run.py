from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.waiting import WAIT_S

pytestmark = pytest.mark.process

SERVE = """
import logging, sys
from pathlib import Path
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.server.run import run_server
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
run_server(ServerConfig(Path(sys.argv[1]), port=0))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-W", "error", "-c", SERVE, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert "on http://127.0.0.1:" in server.stdout.readline()
        server.send_signal(number)
        _, errors = server.communicate(timeout=WAIT_S)
    assert (server.returncode, errors) == (0, "")
