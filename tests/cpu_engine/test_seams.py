from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry

from sgl_kvfetch.plugin.seams import Kind, rows_of
from sglang_on_cpu import seams

# Prints the package of SGLang's platform, and whether the first hook of the table is there.
PLATFORM = """
import torch
torch.accelerator.is_available = lambda: True
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.entrypoints.engine import _set_envs_and_config
print(type(current_platform).__module__.partition(".")[0], hasattr(_set_envs_and_config, "__wrapped__"))
"""


@pytest.mark.sglang
def test_nothing_is_done_where_there_is_an_accelerator(tmp_path: Path) -> None:
    """Where there is none, no test of a real server would pass otherwise."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", PLATFORM]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["sglang", "False"]


def test_no_hook_is_installed_where_sglang_lacks_a_target(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(seams, "is_active", lambda: True)
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: pytest.fail(f"installed {hook}"))
    rows: list[tuple[str, Kind, str]] = [
        (f"sglang.srt.server_args.ServerArgs.{name}", "before", "without_pinning")
        for name in ("resolve_once", "no_such")
    ]
    monkeypatch.setattr(seams, "SEAMS", tuple(rows_of("sglang_on_cpu.platform", *rows)))
    seams.register()
    (message,) = caplog.messages
    assert message.startswith("sglang_on_cpu is off: sglang.srt.server_args.ServerArgs.no_such not found")
