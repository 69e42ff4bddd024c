"""Exit codes of commands that run as processes, against S3: obstore's threads outlive the answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, running_s3_server

pytestmark = pytest.mark.process

RUNS = 3  # of each command; Python's own end aborts one in five, so that nine runs tell


@pytest.fixture(scope="module")
def environment() -> Iterator[dict[str, str]]:
    """The environment of a user of a bucket."""
    with running_s3_server() as s3:
        yield os.environ | {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": f"http://{s3.host}:{s3.port}",
            "AWS_REGION": "us-east-1",
        }


@pytest.mark.parametrize(
    ("command", "code", "what"),
    [
        (("inspect", f"s3://{BUCKET}/kv"), 0, "no segments"),
        (("pin", f"s3://{BUCKET}/kv", "--remove", "0" * 64), 1, "there was no such pin"),
        (("inspect", "s3://no-such-bucket/kv"), 2, "NoSuchBucket"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, tuple) else None,
)
def test_a_command_ends_with_its_own_exit_code(
    environment: dict[str, str], command: tuple[str, ...], code: int, what: str
) -> None:
    def run(_: int) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, "-m", "sgl_kvfetch.tools", *command]
        return subprocess.run(whole, env=environment, capture_output=True, text=True, timeout=240)

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(run, range(RUNS)))
    assert [done.returncode for done in runs] == [code] * RUNS, runs[0].stderr
    assert all(what in done.stdout + done.stderr for done in runs), runs[0]
