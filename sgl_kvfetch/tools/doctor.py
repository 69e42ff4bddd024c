"""``kvfetch doctor``: check the installed software, the GPU and a store.

Everything that may be missing or broken is imported where it is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import io
import os
import secrets
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import unquote, urlsplit

import typer

from sgl_kvfetch.errors import ConfigError, StoreError
from sgl_kvfetch.keys import PAGE_HASH_BYTES
from sgl_kvfetch.log import printable
from sgl_kvfetch.tools.terminal import STORE_HELP, StoreAccess, format_age, json_flag, option, say, show

if TYPE_CHECKING:
    import torch

    from sgl_kvfetch.stores import AdminStore

PLUGIN_GROUP, PLUGIN = "sglang.srt.plugins", "kvfetch"
TIMEOUT_S = 10.0  # of a request to the store
_MOST_AUDITED = 8  # namespaces, those that were audited last
_INSTALL_GPU = "pip install '.[gpu]' in a checkout"
_INSTALL_VIDEO = "install the driver's video libraries (containers: NVIDIA_DRIVER_CAPABILITIES=compute,video,utility)"
_CPU_CODECS = "codecs run on the CPU"
_SEAMS = "SGLang's seams"
_CPU_ENGINE = "sglang_on_cpu"  # the package in cpu_engine/ of the repository
STORE = "store"
_WHAT = {"SGLang": "SGLang, which is imported (a busy machine takes a minute)", "CUDA GPU": "for a CUDA GPU"}

Status = Literal["yes", "no", "warn"]


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report. ``no``: missing, and host mode needs it. ``warn``: missing, but host mode works."""

    name: str
    status: Status
    found: str
    advice: str = ""  # how to fix it; required unless the status is "yes"

    def __post_init__(self) -> None:
        assert self.status == "yes" or self.advice, self.name


_COLOURS: dict[Status, str] = {"yes": "green", "no": "red", "warn": "yellow"}


def doctor(
    access: StoreAccess,
    store: Annotated[str | None, typer.Argument(metavar="[STORE]", help=f"Also check this store: {STORE_HELP}")] = None,
    store_only: Annotated[
        bool, option(None, "Check only the store, on a machine without SGLang.", "--store-only")
    ] = False,
    as_json: Annotated[bool, json_flag(list[Check])] = False,
) -> None:
    """Check a store and what this machine can do, and show how to fix each "no".

    The exit code is 0 if the store answers and this machine has everything that host mode needs
    (--enable-hierarchical-cache --hicache-storage-backend kvfetch), and 1 if not. Host mode also runs without the
    things marked "warn". Each result is printed as soon as it is there, the store's first. Stderr says what is being
    checked.

    Examples:

        kvfetch doctor

        kvfetch doctor http://cache:8700 --token-file token

        kvfetch doctor s3://bucket/prefix --store-only
    """
    checks: dict[str, Callable[[], list[Check]]] = {}
    if store is not None:
        checks[STORE] = lambda: check_store(store, access)
    elif store_only:
        raise ConfigError("--store-only needs a store: kvfetch doctor STORE --store-only")
    if not store_only:
        checks |= {
            "SGLang": check_sglang,
            "CUDA GPU": check_gpu,
            "Triton": check_triton,
            "codecs": check_codecs,
            "audits": lambda: check_audits(store),
        }
    of_store: list[Check] = []
    of_machine: list[Check] = []
    for name, check in checks.items():
        say(f"checking {store if name == STORE else _WHAT.get(name, name)} ...", err=True)
        rows = run_check(name, check)
        (of_store if name == STORE else of_machine).extend(rows)
        if not as_json:
            for row in rows:
                _print(row)
    found = [*of_store, *of_machine]
    no_sglang = not store_only and importlib.util.find_spec("sglang") is None
    if _missing(found) and no_sglang and store is not None and not as_json:
        say(f"SGLang is not installed here. On a store's machine, type: kvfetch doctor {store} --store-only")
    verdicts = [] if store is None else [_verdict("the store can be used from here", of_store)]
    verdicts += [] if store_only else [_verdict("host mode can run here", of_machine)]
    show(found, as_json, ["; ".join(verdicts)])
    if _missing(found):
        raise typer.Exit(1)


def _missing(rows: Sequence[Check]) -> int:
    return sum(row.status == "no" for row in rows)


def _verdict(text: str, rows: Sequence[Check]) -> str:
    return f"{text.replace('can', 'cannot')}: {_missing(rows)} to fix" if _missing(rows) else text


def _print(row: Check) -> None:
    """Print a row, and what to do in the next line."""
    say(f" {printable(row.found)}", before=f"{row.name:20} {typer.style(f'{row.status:4}', fg=_COLOURS[row.status])}")
    if row.advice:
        say(f"{'':20} {'':4} {printable(row.advice)}")


def run_check(name: str, check: Callable[[], list[Check]]) -> list[Check]:
    """Return the check's rows. An unexpected exception, from a driver for example, becomes a row as well.

    Raises ConfigError if the user's input is invalid.
    """
    try:
        return check()
    except (ConfigError, KeyboardInterrupt):
        raise
    except BaseException as e:  # SystemExit too: SGLang's modules may raise it on import
        advice = "repair or install what the message names"
        return [Check(name, "no", f"{type(e).__name__}: {first_line(e)}", advice)]


def first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:300]


def check_sglang() -> list[Check]:
    """Check SGLang's version, our registration as its plugin, the seams that we use, and the C++ compiler."""
    from sgl_kvfetch.plugin.versions import NEWEST, check_version

    install = f'pip install "sglang=={NEWEST}"'
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [Check("SGLang", "no", "not installed", install)]
    if mismatch := check_version():
        return [Check("SGLang", "no", mismatch, install)]
    checks = [Check("SGLang", "yes", version), _check_registration()]
    checks += run_check(_SEAMS, lambda: [_check_seams(install)])
    return [*checks, _check_compiler()]


def _check_registration() -> Check:
    name = "plugin registered"
    if not any(point.name == PLUGIN for point in importlib.metadata.entry_points(group=PLUGIN_GROUP)):
        advice = "install this package: pip install . in a checkout"
        return Check(name, "no", f"no entry point {PLUGIN!r} in {PLUGIN_GROUP}", advice)
    chosen = os.environ.get("SGLANG_PLUGINS")
    if chosen and PLUGIN not in [plugin.strip() for plugin in chosen.split(",")]:
        return Check(name, "no", f"SGLANG_PLUGINS={chosen} excludes it", f"add {PLUGIN} to SGLANG_PLUGINS")
    return Check(name, "yes", f"entry point {PLUGIN!r} in {PLUGIN_GROUP}")


def _check_seams(install: str) -> Check:
    from sgl_kvfetch.plugin.seams import check_seams, installed_seams

    noise = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        warnings.simplefilter("ignore")
        mismatches = check_seams()
    count = len(installed_seams())
    if not mismatches:
        return Check(_SEAMS, "yes", f"all {count} as expected")
    more = f" (and {len(mismatches) - 1} more)" if len(mismatches) > 1 else ""
    advice = f"{install} --force-reinstall --no-deps; other plugins or patches may have changed it"
    return Check(_SEAMS, "no", f"{mismatches[0]}{more}", advice)


def _check_compiler() -> Check:
    """Look for a C++ compiler: SGLang compiles its page hash on the first request. This Python environment's own
    programs count as well."""
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)))
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool, path=path) is None]
    if missing:
        advice = f"install {' and '.join(missing)} (apt-get install g++ libssl-dev; pip install ninja)"
        return Check("C++ compiler", "no", f"{' and '.join(missing)} not found on PATH", advice)
    return Check("C++ compiler", "yes", "g++ and ninja, for SGLang's page hash")


_OLDEST_TRITON = 3, 6  # as in pyproject.toml


def check_triton() -> list[Check]:
    if importlib.util.find_spec("triton") is None:
        return [Check("Triton", "warn", "not installed", f"{_INSTALL_GPU}, to restore on the GPU")]
    version = importlib.metadata.version("triton")
    if tuple(map(int, version.split(".")[:2])) < _OLDEST_TRITON:
        return [Check("Triton", "warn", f"{version} cannot compile the kernels", "pip install 'triton>=3.6'")]
    return [Check("Triton", "yes", version)]


def check_codecs() -> list[Check]:
    """Encode and decode two small frames with each codec."""
    import torch

    from sgl_kvfetch.codec import CODECS
    from sgl_kvfetch.codec.bitstream.nvdec import moving_gradients

    frames = moving_gradients(2)
    checks = []
    for name, codec in CODECS.items():
        label = f"codec {name}"
        started_s = time.perf_counter()
        try:
            bitstream = codec.encode(frames)
            same = torch.equal(codec.decode(bitstream, (len(frames), *frames.shape[2:])), frames)
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


def check_audits(store: str | None = None) -> list[Check]:
    """Say whether what is stored, in this store or in any, fits the prompts that servers of this machine serve, and
    what they do not use, since audits found it wrong."""
    from sgl_kvfetch.plane.audit import AuditRecord, audit_records

    kept = audit_records()
    if store is not None:
        kept = {path: record for path, record in kept.items() if record.store.rstrip("/") == store.rstrip("/")}
    off = {path: record for path, record in kept.items() if record.why_off}
    wrong = [
        Check(
            "audits",
            "warn",
            f"{record.model}, {record.quantiser}, in {record.store}, is not used here: {record.why_off}",
            f"docs/operations.md#audits says what to do; to try again at once, delete {path} and attach the store",
        )
        for path, record in off.items()
    ]
    without = {(record.store, record.model, record.identity) for record in off.values()}
    of_ranks: dict[tuple[str, str, str], AuditRecord] = {}  # of each namespace's ranks, the one with most errors
    for record in kept.values():
        key = record.store, record.model, record.identity
        if record.parts and key not in without:
            known = of_ranks.setdefault(key, record)
            of_ranks[key] = max(known, record, key=lambda each: each.summary().typical)
    fitting = []
    for record in list(of_ranks.values())[:_MOST_AUDITED]:
        found = record.summary()
        age = format_age(time.time() - found.at_s)
        line = f"{record.model}, {record.quantiser}, in {record.store}: {found.says}; the last was {age} ago"
        fitting.append(Check("audits", "warn" if found.advice else "yes", line, found.advice))
    return [*wrong, *fitting] or [Check("audits", "yes", "no server of this machine has audited it yet")]


def check_gpu() -> list[Check]:
    import torch

    if not torch.cuda.is_available():
        advice = "nothing on this machine; if servers have a GPU, run doctor there"
        return [_without_gpu(torch.__version__), Check("NVDEC", "warn", f"no GPU; {_CPU_CODECS}", advice)]
    major, minor = torch.cuda.get_device_capability()
    count = torch.cuda.device_count()
    found = f"{count} x {torch.cuda.get_device_name()}, compute capability {major}.{minor}, torch {torch.__version__}"
    torch.zeros(1, device="cuda")  # the video libraries need a current CUDA context
    restoring = _check_restoring(torch.device("cuda", torch.cuda.current_device()))
    return [Check("CUDA GPU", "yes", found), *restoring, *_check_nvdec(), _check_decoding()]


def _check_restoring(device: torch.device) -> list[Check]:
    """Try what device mode does on the GPU beside video, as a server does at its start."""
    from sgl_kvfetch.codec import Device

    gpu = Device(device)
    single = gpu.why_no_batches()
    copies = Check("batches of copies", "yes", "copied what they should")
    if single:
        advice = "nothing: loads in device mode take a little longer; CUDA 12.8 and later have batches"
        copies = Check(copies.name, "warn", single, advice)
    if importlib.util.find_spec("triton") is None:
        return [copies, Check("restore_klt", "warn", "needs Triton", f"{_INSTALL_GPU}, to restore on the GPU")]
    from sgl_kvfetch.triton_kernels import klt_choice, restore_exact
    from sgl_kvfetch.triton_kernels.ans import try_gpu_ans

    decodes, about = try_gpu_ans(gpu)
    advice = "in device mode the CPU does this part; update Triton and the driver, or report what the message says"
    decoding = Check("ans", "yes", about) if decodes else Check("ans", "warn", about, advice)
    checks = [copies, decoding]
    for name, fault_on_gpu in (("klt", klt_choice.fault_on_gpu), ("exact", restore_exact.fault_on_gpu)):
        try:
            fault = fault_on_gpu(device)
        except Exception as e:  # a compiler and a driver fail in many ways
            fault = f"{type(e).__name__}: {first_line(e)}"
        found = (
            ("warn", f"{name} is restored on the CPU: {fault}", advice) if fault else ("yes", "gives the CPU's values")
        )
        checks.append(Check(f"restore_{name}", *found))
    return checks


def _without_gpu(torch_version: str) -> Check:
    if importlib.util.find_spec(_CPU_ENGINE) is not None:
        advice = "nothing if you only run tests; serve models from a machine with a GPU"
        return Check("CUDA GPU", "warn", f"none (torch {torch_version}); {_CPU_ENGINE} is installed", advice)
    advice = (
        "to run SGLang on this CPU, for tests: pip install ./cpu_engine in a clone of the repository; "
        "if there is a GPU, check nvidia-smi and install a CUDA build of torch"
    )
    return Check("CUDA GPU", "warn", f"torch {torch_version} finds no usable GPU", advice)


def _check_nvdec() -> list[Check]:
    from sgl_kvfetch.codec.bitstream.nvdec import decode_caps

    binding = _check_binding()
    try:
        found = decode_caps()
    except OSError as e:
        return [binding, Check("NVDEC", "warn", f"{first_line(e)}; {_CPU_CODECS}", _INSTALL_VIDEO)]
    if (caps := found.get("hevc")) is not None:
        size = f"up to {caps.max_width}x{caps.max_height}"
        return [binding, Check("NVDEC", "yes", f"HEVC 4:4:4 8-bit, {caps.num_engines} engines, {size}")]
    if (caps := found.get("hevc420")) is not None:
        advice = 'write with codec = "hevc420", which this GPU decodes'
        return [binding, Check("NVDEC", "warn", f"HEVC 4:2:0 only, {caps.num_engines} engines", advice)]
    return [binding, Check("NVDEC", "warn", f"decodes no HEVC; {_CPU_CODECS}", 'write with codec = "zstd"')]


def _check_decoding() -> Check:
    """Decode two pictures with the decoder that a server would use."""
    from sgl_kvfetch.codec.bitstream.nvdec import open_current_nvdec

    name = "HEVC decoding"
    nvdec, about = open_current_nvdec()
    if nvdec is not None:
        return Check(name, "yes", about)
    return Check(name, "warn", about, "see PyNvVideoCodec and NVDEC; until then zstd decodes faster than HEVC on a CPU")


def _check_binding() -> Check:
    """Import PyNvVideoCodec. It needs the encoder's library even to decode."""
    from sgl_kvfetch.codec.bitstream.nvdec import ENCODE_LIBRARY

    name = "PyNvVideoCodec"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        return Check(name, "warn", f"not installed; {_CPU_CODECS}", _INSTALL_GPU)
    except Exception as e:  # it loads the driver's libraries
        advice = f"update the NVIDIA driver, then: {_INSTALL_GPU}"
        if ENCODE_LIBRARY in str(e):
            advice = f"{_INSTALL_VIDEO}; on a GPU without NVENC a stub will do: docs/gpus.md"
        return Check(name, "warn", f"does not import: {first_line(e)}", advice)
    return Check(name, "yes", str(getattr(module, "__version__", "installed")))


def check_store(url: str, access: StoreAccess) -> list[Check]:
    """Check a store without changing it. Raises ConfigError for an invalid URL."""
    from sgl_kvfetch.directory import open_store
    from sgl_kvfetch.stores import HttpOptions, takes_token
    from sgl_kvfetch.tools.target import store_url

    url = store_url(url)
    token = access.secret if takes_token(url) else None
    options = HttpOptions(timeout_s=TIMEOUT_S, max_attempts=2, tls=access.certificate)
    store, parts = open_store(url, token=token, options=options), urlsplit(url)
    checks = [_check_directory(Path(unquote(parts.path)))] if parts.scheme == "file" else []
    return checks + asyncio.run(_ask(store, url, access, token is not None))


def _check_directory(path: Path) -> Check:
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.R_OK | os.W_OK | os.X_OK):
        advice = f"make {existing} a directory that this user can write, or choose another"
        return Check("store writable", "no", f"{existing} is not a writable directory", advice)
    return Check("store writable", "yes", str(path) if existing == path else f"{path}, created at the first write")


async def _ask(store: AdminStore, url: str, access: StoreAccess, has_token: bool) -> list[Check]:
    started_s = time.perf_counter()
    try:
        # A random page is stored nowhere. An empty answer shows that lookups work.
        namespace = f"{secrets.token_hex(16)}.0-1"
        await store.lookup(namespace, [secrets.token_bytes(PAGE_HASH_BYTES)])
    except StoreError as e:
        return _failed(e, url, access)
    finally:
        await store.close()
    took_ms = 1000 * (time.perf_counter() - started_s)
    return [
        Check("store reachable", "yes", url),
        Check("store authorised", "yes", "with a token" if has_token else "without a token"),
        Check("store lookup", "yes", f"answered in {took_ms:.0f} ms, including the connection"),
    ]


def _failed(error: StoreError, url: str, access: StoreAccess) -> list[Check]:
    from sgl_kvfetch.tools.target import advice

    what_to_do = advice(error, access.token_source) or f"check that {url} is a kvfetch store, and read its log"
    if error.reason in ("refused", "timeout"):
        return [Check("store reachable", "no", str(error), what_to_do)]
    name = "store authorised" if error.reason == "unauthorised" else "store lookup"
    return [Check("store reachable", "yes", url), Check(name, "no", str(error), what_to_do)]
