"""``kvfetch encode`` as a user meets it."""

import os
import signal
import subprocess
import sys

import pytest

from harness.waiting import WAIT_S
from sgl_kvfetch.codec.container.manifest import decode_manifest
from tests.tools.conftest import Stored, flip, kvfetch, kvfetch_json


def variants(stored: Stored, index: int) -> list[tuple[str, str]]:
    manifest = decode_manifest(stored.manifest_path(index).read_bytes())
    return [(v.codec, v.resolution) for v in manifest.variants]


def test_a_store_is_encoded_once(stored: Stored) -> None:
    result = kvfetch("encode", stored.url, "--grace", "0", "--resolutions", "240p,480p")
    assert result.exit_code == 0
    assert "3 segments encoded, 0 already done, 0 failed" in result.stdout
    assert "smaller than raw" in result.stdout
    for index in range(3):
        assert variants(stored, index) == [("hevc", "240p"), ("hevc", "480p")]
    assert kvfetch("verify", stored.url).exit_code == 0

    again = kvfetch("encode", stored.url, "--grace", "0", "--resolutions", "240p,480p")
    assert "0 segments encoded, 3 already done, 0 failed" in again.stdout
    assert "smaller than raw" not in again.stdout

    report = kvfetch_json("encode", stored.url, "--grace", "0", "--keep-source", "--codec", "deflate")
    assert (report["num_encoded"], report["num_deleted"], report["failures"]) == (3, 0, {})
    assert variants(stored, 1)[:2] == [("deflate", "240p"), ("hevc", "240p")]


def test_a_segment_that_cannot_be_encoded_is_the_exit_code(stored: Stored) -> None:
    """It stays as it is, and others are encoded. First one namespace alone."""
    namespace = stored.segments[2].manifest.key.namespace
    result = kvfetch("encode", f"{stored.url}#{namespace}", "--grace", "0", "--codec", "deflate")
    assert "1 segments encoded" in result.stdout
    assert variants(stored, 2) == [("deflate", "240p")]
    assert variants(stored, 0) == [("hevc", "240p")]
    flip(stored.data_path(1), 0)
    result = kvfetch("encode", stored.url, "--grace", "0", "--codec", "deflate")
    assert result.exit_code == 1
    assert f"FAILED {stored.segments[1].manifest.key.manifest_name}: " in result.stdout
    assert "checksum" in result.stdout
    assert "1 segments encoded, 1 already done, 1 failed" in result.stdout
    assert stored.manifest_path(1).read_bytes() == stored.segments[1].manifest.encode()
    assert stored.data_path(1).exists()
    assert variants(stored, 0) == [("deflate", "240p")]


@pytest.mark.process
@pytest.mark.parametrize(("option", "exit_code"), [("--watch", 0), ("--grace=600", -signal.SIGTERM)])
def test_a_service_stops_in_good_order_and_others_are_killed(stored: Stored, option: str, exit_code: int) -> None:
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "encode", stored.url, option, "-v"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).startswith(b"kvfetch: replaced"):
            assert line
        process.send_signal(signal.SIGTERM)
        said, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == exit_code
    assert (b"segments encoded" in said) == (exit_code == 0)
