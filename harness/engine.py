"""Runs a real SGLang server as a child process, for tests, demonstrations and benchmarks."""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from harness.children import count_with_descendants, note_cpu_time, start_child
from harness.imported_sglang import ForkedProcess, ImportedSGLang, common_environment
from harness.waiting import WAIT_S, polls

logger = logging.getLogger(__name__)

CPU_ARGS: tuple[str, ...] = (
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--dtype", "float32"),
    *("--max-total-tokens", "4096"),
    *("--max-running-requests", "4"),
    *("--context-length", "2048"),
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--sleep-on-idle",  # or an idle scheduler keeps a core busy that others could use
)
COMMON_ARGS: tuple[str, ...] = ("--page-size", "16", "--enable-cache-report", "--enable-metrics")

_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "dxg", "davinci[0-9]*", "accel*")  # of drivers, in /dev
_LOG_TAIL_LINES = 60


class ServerError(RuntimeError):
    """The server did not start, died, or refused a request. The message holds its answer or the end of its log."""


@dataclass(frozen=True)
class Generation:
    """One answer of ``/generate``.

    ``logprobs`` are those of the output tokens, if they were requested. ``cached_tokens`` counts the prompt tokens that
    were not computed, and ``cached_tokens_details`` says which tiers they came from. ``ttft_s`` is measured by the
    client.
    """

    text: str
    output_ids: list[int]
    logprobs: list[float]
    cached_tokens: int
    cached_tokens_details: dict[str, Any]
    ttft_s: float
    meta_info: dict[str, Any] = field(repr=False)


def hicache_args(
    store_url: str,
    *,
    prefetch_policy: str | None = "wait_complete",
    host_pool_gb: int | None = None,
    **config: Any,
) -> list[str]:
    """Return the flags of host mode: our storage backend behind SGLang's host pool. ``prefetch_policy``: None for
    SGLang's own. ``host_pool_gb``: see `host_tier_args`. ``config``: keys of our config beside those of
    `extra_config`."""
    policy = () if prefetch_policy is None else ("--hicache-storage-prefetch-policy", prefetch_policy)
    return [*host_tier_args(host_pool_gb), *policy, *device_args(store_url, **config)]


def host_tier_args(host_pool_gb: int | None = None) -> list[str]:
    """Return the flags of SGLang's host pool alone, to which a storage backend can be attached.

    ``host_pool_gb`` is a rank's share. None makes the pool four times as large as the device's, which is little for
    tests: SGLang touches all of it at the start, 1 GB in 0.7 s of CPU time.
    """
    size = ("--hicache-ratio", "4") if host_pool_gb is None else ("--hicache-size", str(host_pool_gb))
    layout = "--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"
    return ["--enable-hierarchical-cache", *size, *layout]


def device_args(store_url: str, **config: Any) -> list[str]:
    """Return the flags of device mode: our storage backend without a host tier."""
    extra = json.dumps(extra_config(store_url, **config))
    return ["--hicache-storage-backend", "kvfetch", "--hicache-storage-backend-extra-config", extra]


def extra_config(store_url: str, **config: Any) -> dict[str, Any]:
    """Return a config for tests. Nothing is computed that is stored, since a small model computes its KV faster than a
    link transfers it. There are no audits, which cut hits at random, and short prompts are looked up. Lookups and
    fetches may take long: on a busy machine they do."""
    patient = {"lookup_timeout_s": WAIT_S, "fetch_timeout_s": WAIT_S, "recompute": "never", "audit_share": 0}
    return {"store": store_url, "prefetch_threshold": 16, **patient, **config}


_MOST_CLAIMS = 64
_claims: deque[int] = deque()  # file descriptors


def free_port() -> int:
    """Return a loopback port that nobody uses now. Nobody takes it before the server does, maybe half a minute later:
    it is below the ports that Linux gives to outgoing connections, and an address that only names it claims it from
    other callers, also of other processes."""
    while True:
        port = secrets.choice(range(12_000, 32_000))
        claim = socket.socket(socket.AF_UNIX)
        with socket.socket() as probe, contextlib.suppress(OSError):
            claim.bind(f"\0sgl_kvfetch port {port}")
            probe.bind(("127.0.0.1", port))
            _claims.append(claim.detach())  # no socket: Python warns of those that are open at its end
            if len(_claims) > _MOST_CLAIMS:
                os.close(_claims.popleft())
            return port
        claim.close()


@functools.cache
def other_models(model_path: str) -> str:
    """Return the names of SGLang's modules that do not have the model's architecture, with commas between them. A
    server that does not skip them imports 250 modules to find one, which takes seconds."""
    config, package = Path(model_path, "config.json"), importlib.util.find_spec("sglang")
    if package is None or package.origin is None or not config.exists():
        return ""
    classes = tuple(f"class {name}(" for name in json.loads(config.read_text())["architectures"])
    modules = {path.stem: path.read_text() for path in Path(package.origin).parent.glob("srt/models/*.py")}
    others = [name for name, text in modules.items() if not any(each in text for each in classes)]
    return ",".join(others) if len(others) < len(modules) else ""


@functools.cache
def has_accelerator() -> bool:
    """Return whether torch finds an accelerator. Torch is imported only where a driver has a device: it takes 2 s."""
    if not any(any(Path("/dev").glob(pattern)) for pattern in _DEVICES):
        return False
    import torch

    return torch.accelerator.is_available()


@contextlib.contextmanager
def servers_find_sglang_imported() -> Iterator[ImportedSGLang]:
    """Fork servers from a process that has imported SGLang, within this context, unless they must import it
    themselves."""
    with ImportedSGLang() as imported:
        SGLangServer.imported = imported
        yield imported
    SGLangServer.imported = None


class SGLangServer:
    """A context manager that runs ``python -m sglang.launch_server`` on a free loopback port, ready when entered.
    Entering raises ``ServerError``, with the log's tail, if the server exits or is not healthy in time.

    ``extra_args`` follow the defaults and override them. ``env`` is added to this process's environment. The log goes
    to ``log_path``, or else to a temporary directory, in which the server runs, because it must not be able to import
    the folder `triton_kernels` of a checkout. SGLang requires an ``admin_api_key`` to attach a storage backend at run
    time; every request carries it. With ``imports_itself`` it is started as users start one, and never forked.
    """

    imported: ClassVar[ImportedSGLang | None] = None

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        log_path: str | os.PathLike[str] | None = None,
        admin_api_key: str | None = None,
        start_timeout_s: float = 240.0,
        request_timeout_s: float = 240.0,
        imports_itself: bool = False,
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True)
        self.log_path = Path(log_path or Path(self._directory.name, "server.log")).absolute()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._start_timeout_s = start_timeout_s
        self._request_timeout_s = request_timeout_s
        self._env = {"SGLANG_DISABLED_MODEL_ARCHS": other_models(os.fspath(model_path)), **common_environment()}
        self._imports_itself = imports_itself
        args = [*(() if has_accelerator() else CPU_ARGS), *COMMON_ARGS, *extra_args]
        self._headers = {"Content-Type": "application/json"}
        if admin_api_key is not None:
            args += ["--admin-api-key", admin_api_key]
            self._headers["Authorization"] = f"Bearer {admin_api_key}"
        self._own_env = dict(env or {})
        model = os.path.abspath(model_path) if os.path.exists(model_path) else os.fspath(model_path)
        self._command = [
            *(sys.executable, "-m", "sglang.launch_server", "--model-path", model),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *args,
        ]
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start the server and wait until it answers ``/health``. If this raises, nothing is left running."""
        assert self._process is None, "already started"
        with open(self.log_path, "wb") as log:
            if self.imported is not None and not self._imports_itself:
                environment = self._env, self._own_env
                self._process = self.imported.start(self._command[1:], self._directory.name, *environment, log, log)
            self._process = self._process or start_child(
                self._command,
                cwd=self._directory.name,
                env=self._env | self._own_env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        count_with_descendants(self._process.pid)
        try:
            self._wait_until_healthy()
        except BaseException:
            self.kill()
            raise

    def log(self) -> str:
        """Return everything that the server has printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        """Return the last lines of the log, without those about requests: polling writes many of them."""
        lines = [line for line in self.log().splitlines() if ' HTTP/1.1" 200 ' not in line]
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def generate(
        self,
        prompt: str | None = None,
        *,
        input_ids: Sequence[int] | None = None,
        max_new_tokens: int = 8,
        logprobs: bool = False,
        cache_salt: str | None = None,
        adapter: str | None = None,
        image: str | None = None,
        **sampling: Any,
    ) -> Generation:
        """Generate from a text or from token ids, greedily unless ``sampling``, more sampling parameters, says
        otherwise. ``adapter``: the name of a LoRA adapter that the server has. ``image``: the URL of one that the text
        has a place for."""
        assert (prompt is None) != (input_ids is None), "give either a prompt or input_ids"
        params = {"max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True}
        body: dict[str, Any] = {"sampling_params": params | sampling, "return_logprob": logprobs, "stream": True}
        body |= {"text": prompt} if input_ids is None else {"input_ids": list(input_ids)}
        more = {"cache_salt": cache_salt, "lora_path": adapter, "image_data": image}
        body |= {name: value for name, value in more.items() if value is not None}
        answer, ttft_s = self._last_event("/generate", body)
        meta = answer["meta_info"]
        return Generation(
            text=answer["text"],
            output_ids=list(answer["output_ids"]),
            logprobs=[entry[0] for entry in meta.get("output_token_logprobs") or ()],
            cached_tokens=meta["cached_tokens"],
            cached_tokens_details=meta.get("cached_tokens_details") or {},
            ttft_s=ttft_s,
            meta_info=meta,
        )

    def metrics(self) -> str:
        """Return the text of ``/metrics``."""
        return self.request("GET", "/metrics")

    def flush(self) -> None:
        """Wait until the server is idle, then empty its device and host tiers."""
        self.request("POST", f"/flush_cache?timeout={WAIT_S / 2:.0f}")

    def request(self, method: str, path: str, body: Any = None) -> str:
        """Make a request and return the answer's body. Raises ``ServerError`` with the answer unless it succeeds."""
        with self._open(method, path, body) as response:
            return str(response.read().decode())

    def _last_event(self, path: str, body: Any) -> tuple[dict[str, Any], float]:
        """Return the last event of a streamed answer, which holds the whole answer, and the seconds to the first."""
        started_s = time.monotonic()
        ttft_s, last = None, b""
        with self._open("POST", path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.monotonic() - started_s
                    last = line
        if ttft_s is None:
            raise ServerError(f"POST {path}: no event in the answer\n{self.log_tail()}")
        event = json.loads(last.removeprefix(b"data: "))
        if "error" in event:
            raise ServerError(f"POST {path}: {event['error']}")
        return event, ttft_s

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: Any) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=self._request_timeout_s) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise ServerError(f"{method} {path}: status {error.code}: {text}") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{method} {path}: {error}\n{self.log_tail()}") from error

    def stop(self) -> None:
        """Let the server end its requests, and end it. Do nothing if it is not running."""
        if self._process is not None:
            # Signal only the server: it would take a signalled scheduler for a crash, and diagnose it for seconds.
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(WAIT_S)
        self.kill()

    def kill(self) -> None:
        """End the server and every process that it started at once. SGLang itself looks for a signal every 5 s."""
        if self._process is None:
            return
        process, self._process = self._process, None
        note_cpu_time(process.pid)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        logger.info("the server's log ended with:\n%s", self.log_tail())
        self._directory.cleanup()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        for _ in polls(self._start_timeout_s, 0.1):
            if (code := self._process.poll()) is not None:
                raise ServerError(f"the server exited with code {code}:\n{self.log_tail()}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return
        raise ServerError(f"the server is not healthy after {self._start_timeout_s:g} s:\n{self.log_tail()}")
