"""Checks of the installed software: Python, SGLang and our plugin in it, Triton, the codecs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import sys
import time
import warnings

from sgl_kvfetch.cli.checks import Check, run_check

MIN_PYTHON = (3, 11)
_SEAMS = "SGLang's seams"
PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "kvfetch"
PICTURE = (144, 144)  # height, width: the smallest that every decoder takes


def check_python() -> list[Check]:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info >= MIN_PYTHON:
        return [Check("Python", "yes", found)]
    needed = ".".join(map(str, MIN_PYTHON))
    return [Check("Python", "no", found, f"make an environment with Python {needed} or newer")]


def check_sglang() -> list[Check]:
    """Check SGLang's version, our registration as its plugin, the seams that we use, and the C++ compiler."""
    from sgl_kvfetch.plugin.seams import SGLANG_VERSION

    install = f'pip install "sglang=={SGLANG_VERSION}"'
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [Check("SGLang", "no", "not installed", install)]
    if version != SGLANG_VERSION:
        return [Check("SGLang", "no", f"{version}; this plugin is checked against {SGLANG_VERSION}", install)]
    checks = [Check("SGLang", "yes", version), _check_registration()]
    checks += run_check(_SEAMS, lambda: [_check_seams(install)])
    return [*checks, _check_compiler()]


def _check_registration() -> Check:
    name = "plugin registered"
    if not any(point.name == PLUGIN for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)):
        advice = "install this package (pip install sgl-kvfetch, or pip install -e . in a checkout)"
        return Check(name, "no", f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}", advice)
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen and PLUGIN not in [plugin.strip() for plugin in chosen.split(",")]:
        return Check(name, "no", f"SGLANG_PLUGINS={chosen} excludes it", f"add {PLUGIN} to SGLANG_PLUGINS")
    return Check(name, "yes", f"entry point {PLUGIN!r} in {PLUGIN_GROUP}")


def _check_seams(install: str) -> Check:
    import torch

    from sgl_kvfetch.plugin.seams import SEAMS, Scope, check_seams

    scopes = {Scope.GATE, Scope.HOST} | (set() if torch.accelerator.is_available() else {Scope.CPU_ENGINE})
    noise = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        warnings.simplefilter("ignore")
        mismatches = check_seams(scopes)
    count = sum(seam.scope in scopes for seam in SEAMS)
    if not mismatches:
        return Check(_SEAMS, "yes", f"all {count} as expected")
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    advice = f"{install} --force-reinstall --no-deps; other plugins or patches may have changed it"
    return Check(_SEAMS, "no", f"{mismatches[0]}{more}", advice)


def _check_compiler() -> Check:
    """Look for a C++ compiler: SGLang compiles its page hash on the first request."""
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=_search_path()) is None]
    if missing:
        advice = f"install {' and '.join(missing)} (apt-get install g++ libssl-dev; pip install ninja)"
        return Check("C++ compiler", "no", f"{' and '.join(missing)} not found on PATH", advice)
    return Check("C++ compiler", "yes", "g++ and ninja, for SGLang's page hash")


def _search_path() -> str:
    """Return PATH, with this Python environment's own programs added."""
    return os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))


def check_triton() -> list[Check]:
    if importlib.util.find_spec("triton") is None:
        return [Check("Triton", "warn", "not installed", 'pip install "sgl-kvfetch[gpu]", to restore on the GPU')]
    return [Check("Triton", "yes", importlib.metadata.version("triton"))]


def check_codecs() -> list[Check]:
    """Encode and decode two small frames with each codec."""
    import torch

    from sgl_kvfetch.codecs import CODECS

    height, width = PICTURE
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    frames = torch.stack([((rows * (plane + 1) + columns) // 2 % 256).to(torch.uint8) for plane in range(3)])
    frames = torch.stack([frames, frames.flip(-1)])
    checks = []
    for name, codec in CODECS.items():
        label = f"codec {name}"
        started_s = time.perf_counter()
        try:
            bitstream = codec.encode(frames)
            same = torch.equal(codec.decode(bitstream, len(frames), height, width), frames)
        except Exception as e:  # PyAV's libraries can raise anything
            advice = "reinstall its library (pip install --force-reinstall av zstandard)"
            checks.append(Check(label, "no", f"{type(e).__name__}: {e}", advice))
            continue
        took_ms = 1000 * (time.perf_counter() - started_s)
        if same:
            checks.append(Check(label, "yes", f"bit for bit, on the CPU ({took_ms:.0f} ms)"))
        else:
            checks.append(Check(label, "no", "the decoded frames differ", f"choose another codec than {name}"))
    return checks
