"""Show a store at work: one SGLang server computes a prompt, and another one fetches it.

    python examples/two_servers.py HuggingFaceTB/SmolLM2-135M-Instruct [MORE FLAGS OF SGLANG]

It starts a store, then one server after the other, so that one GPU is enough. Nothing is left when it ends. It prints,
for each server, how many tokens came from the store and the time to the first token. Without a GPU, SGLang runs on the
CPU, if ./cpu_engine of the repository is installed, too: slow, and good for a first look.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROMPT = "".join(f"Rule {number}: whoever opens door {number} must close door {number + 7}. " for number in range(60))
ON_CPU = (
    "--device cpu --attention-backend torch_native --dtype float32 --disable-cuda-graph --max-total-tokens 4096 "
    "--context-length 2048 --hicache-size 1 --hicache-mem-layout page_first_direct --hicache-io-backend direct"
)


def main(model: str, flags: list[str]) -> None:
    if shutil.which("nvidia-smi") is None:
        flags = [*ON_CPU.split(), *flags]
    with tempfile.TemporaryDirectory() as folder:
        store = f"http://127.0.0.1:{free_port()}"
        serve = ["kvfetch", "serve", folder, "--port", store.rpartition(":")[2]]
        with running(serve, f"{store}/healthz"):
            for name in ("first server", "second server"):
                server = f"http://127.0.0.1:{free_port()}"
                with running(sglang(model, store, server, flags), f"{server}/health"):
                    ask(server, "The weather is fine. ")  # its first request takes longer, whatever the prompt
                    cached_tokens, seconds = ask(server, PROMPT)
                    print(f"{name}: cached_tokens {cached_tokens}, first token after {seconds:.2f} s", flush=True)
                    if name == "first server":
                        wait_until_stored(store, server)


def wait_until_stored(store: str, server: str) -> None:
    """Wait until the server finds all of the prompt: it loses what it has not written when it stops."""
    why = ["kvfetch", "why", store, "--server", server, "--prompt", PROMPT]
    for _ in range(60):
        answer = subprocess.run(why, stdout=subprocess.PIPE, text=True)
        if answer.returncode == 0:
            return
        time.sleep(1)
    sys.exit(answer.stdout)


def sglang(model: str, store: str, server: str, flags: list[str]) -> list[str]:
    # By default, what is sooner computed than fetched is computed, and so are the last tokens of a hit in a hundred, to
    # compare them with what is stored.
    config = {"store": store, "recompute": "never", "audit_share": 0}
    return [
        *("sglang", "serve", "--model-path", model, "--port", server.rpartition(":")[2], "--page-size", "64"),
        *("--enable-metrics", "--enable-hierarchical-cache", "--hicache-storage-backend", "kvfetch"),
        *("--hicache-storage-backend-extra-config", json.dumps(config), *flags),
    ]


def ask(server: str, text: str) -> tuple[int, float]:
    """Return how many of the prompt's tokens were not computed, and the seconds until the first token."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    request = urllib.request.Request(
        f"{server}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    started = time.monotonic()
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    return answer["meta_info"]["cached_tokens"], time.monotonic() - started


@contextmanager
def running(command: list[str], health: str) -> Iterator[None]:
    """Run a server until the block ends. The block begins when it answers."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while not answers(health):
                if process.poll() is not None:
                    log.seek(0)
                    sys.exit(f"{' '.join(command)}\n{log.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.5)
            yield
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # SGLang's processes are a group of their own
            process.wait()


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    model = sys.argv[1]
    main(str(Path(model).resolve()) if Path(model).exists() else model, sys.argv[2:])
