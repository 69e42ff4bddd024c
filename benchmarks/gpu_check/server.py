"""Checks SGLang in device mode on the GPU: one server stores a prompt, a fresh one fetches it from the store."""

from __future__ import annotations

import importlib.util
import random
import tempfile
from pathlib import Path

from benchmarks.gpu_check.record import Record, SkippedError
from harness.engine import Generation, SGLangServer, device_args
from harness.metrics import read_metric, wait_until_written
from harness.models import make_tiny_llama
from harness.store_process import StoreProcess

PAGE_TOKENS = 16
PROMPT_TOKENS = 1280
_NEEDED = ("sglang", "sgl_kernel", "transformers", "tokenizers")
_FLAGS = ("--dtype", "bfloat16", "--mem-fraction-static", "0.3", "--disable-cuda-graph", "--skip-server-warmup")
_START_S = 50.0


def run(record: Record) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not installed")
    rng = random.Random(0)
    prompt = [rng.randrange(3, 2048) for _ in range(PROMPT_TOKENS)]
    with tempfile.TemporaryDirectory() as folder, StoreProcess(Path(folder, "store")) as store:
        model = make_tiny_llama(Path(folder, "model"))
        flags = [*_FLAGS, *device_args(store.url, quantiser="exact", codec="zstd")]
        computed, _ = _ask(model, flags, prompt, waits=True)
        fetched, metrics = _ask(model, flags, prompt, waits=False)
    from_store = int(fetched.cached_tokens_details.get("storage", 0))
    is_same = fetched.output_ids == computed.output_ids
    record.row(
        "SGLang in device mode, a tiny Llama, exact",
        prompt_tokens=PROMPT_TOKENS,
        from_store=from_store,
        same_answer=is_same,
        misses=read_metric(metrics, "sgl_kvfetch_misses_total"),
        computed_ttft_ms=1e3 * computed.ttft_s,
        fetched_ttft_ms=1e3 * fetched.ttft_s,
    )
    if from_store < 0.9 * PROMPT_TOKENS:
        record.fail(f"only {from_store} of {PROMPT_TOKENS} tokens came from the store")
    if not is_same:
        record.fail(f"the answer from the store is {fetched.output_ids}, expected {computed.output_ids}")


def _ask(model: Path, flags: list[str], prompt: list[int], *, waits: bool) -> tuple[Generation, str]:
    """Start a server, and return its answer to ``prompt`` and its metrics."""
    with SGLangServer(model, extra_args=flags, start_timeout_s=_START_S, request_timeout_s=_START_S) as server:
        answer = server.generate(input_ids=prompt, max_new_tokens=16)
        if waits:
            wait_until_written(server, PROMPT_TOKENS // PAGE_TOKENS, 20.0)
        return answer, server.metrics()
