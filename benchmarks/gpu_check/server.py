"""Checks and measures SGLang in device mode on the GPU, where its `sgl_kernel` is missing with stand-ins.

A small Llama stores with `exact`: a prefix that is fetched must give the answer that SGLang's own cache gives. (A
computed prompt adds up in another order, so its log probabilities differ in either case.) A model of Llama-3.1-8B's
shape with random weights stores with `klt`, in a profile that nobody calibrated: its times count, not its answers.
"""

from __future__ import annotations

import importlib.util
import json
import random
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.flat_profile import flat_profile
from benchmarks.gpu_check.record import Record, SkippedError
from harness import sglang_standins
from harness.engine import Generation, SGLangServer, device_args
from harness.metrics import wait_until_written
from harness.models import make_llama_8b_config, make_tiny_llama
from harness.store_process import StoreProcess
from harness.waiting import wait_until

PAGE_TOKENS = 64
# SGLang's scheduler imports these, and the bundle has all of them but SGLang from the machine.
_NEEDED = (
    *("sglang", "transformers", "tokenizers", "torchvision", "PIL", "requests", "httpx", "einops", "sentencepiece"),
    "traitlets",
)
_FLAGS = ("--dtype", "bfloat16", "--disable-cuda-graph", "--skip-server-warmup", "--page-size", str(PAGE_TOKENS))
_START_S, _REQUEST_S, _WRITE_S = 100.0, 60.0, 40.0
_NEW_TOKENS = 16
_CONFIG: dict[str, Any] = {"fetch_timeout_s": 60.0}
_STEP = 1.5  # about 1.5 bits a value, of values with a standard deviation of 1


@dataclass(frozen=True)
class Sizes:
    """What the large model is measured with. Lengths are in tokens. ``gbps`` has speeds of the link; 0 is no limit."""

    prompts: Sequence[int] = (8192, 32768)
    gbps: Sequence[float] = (0, 10)
    running: int = 600  # of the answer beside which a prompt is fetched, and one is computed
    alone: int = 30  # of that answer that come beside nothing


def run(record: Record) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        env, flags = prepare(record, folder)
        with StoreProcess(folder / "store") as store:
            model = make_tiny_llama(folder / "model")
            args = [*flags, "--mem-fraction-static", "0.3", *device_args(store.url, quantiser="exact", **_CONFIG)]
            with _server(model, args, env) as server:
                check(record, server, num_tokens=1280)


def run_large(record: Record) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, sizes = Path(temporary), Sizes()
        env, flags = prepare(record, folder)
        flat_profile(_STEP).save(folder / "profile")
        with StoreProcess(folder / "store") as store:
            config: dict[str, Any] = dict(
                quantiser="klt", codec="ans", profile=str(folder / "profile"), model_id="random-8b"
            )
            args = [*flags, "--load-format", "dummy", "--max-running-requests", "8", "--mem-fraction-static", "0.9"]
            args += ["--chunked-prefill-size", "8192", "--context-length", str(max(sizes.prompts) + 2048)]
            args += ["--max-total-tokens", "81920", *device_args(store.url, **_CONFIG, **config)]
            with _server(make_llama_8b_config(folder / "model"), args, env) as server:
                measure(record, server, store, sizes)


def prepare(record: Record, folder: Path) -> tuple[dict[str, str], list[str]]:
    """Return the environment and the flags of servers, with stand-ins if `sgl_kernel` is missing. Raises
    SkippedError."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not installed")
    if importlib.util.find_spec("sgl_kernel") is not None:
        return {}, list(_FLAGS)
    record.note("stand-ins took the place of sgl_kernel, which is not installed")
    site = folder / "site"
    site.mkdir()
    return sglang_standins.lay_out(site, folder / "standins.log"), [*_FLAGS, *sglang_standins.FLAGS]


def _server(model: Path, args: list[str], env: dict[str, str]) -> SGLangServer:
    limits = {"start_timeout_s": _START_S, "request_timeout_s": _REQUEST_S}
    return SGLangServer(model, extra_args=args, env=env, **limits)  # type: ignore[arg-type]


def check(record: Record, server: SGLangServer, num_tokens: int) -> None:
    """Compute a prompt, ask for it again, and have it fetched from the store. The last two answers must be equal."""
    _ask(server, _prompt(1, num_tokens // 2))  # compiles kernels
    prompt = _prompt(0, num_tokens)
    computed, cached = (_ask(server, prompt) for _ in range(2))
    wait_until_written(server, num_tokens // PAGE_TOKENS, _WRITE_S)
    server.flush()
    fetched = _ask(server, prompt)
    from_store = int(fetched.cached_tokens_details.get("storage", 0))
    is_same = fetched.output_ids == cached.output_ids
    for path, answer in (("computed", computed), ("SGLang's own cache", cached), ("fetched", fetched)):
        record.row(
            "SGLang in device mode, a tiny Llama, exact",
            path=path,
            ttft_ms=1e3 * answer.ttft_s,
            cached_tokens=answer.cached_tokens,
            from_store=int(answer.cached_tokens_details.get("storage", 0)),
            same_answer_as_own_cache=answer.output_ids == cached.output_ids,
            log_probability_gap=_gap(answer, cached),
        )
    if from_store < num_tokens - PAGE_TOKENS:  # SGLang computes the last page
        record.fail(f"only {from_store} of {num_tokens} tokens came from the store")
    if not is_same:
        record.fail(f"the answer from the store is {fetched.output_ids}, expected {cached.output_ids}")


def measure(record: Record, server: SGLangServer, store: StoreProcess, sizes: Sizes) -> None:
    """Record the time to the first token of prompts that are computed, in SGLang's own cache, and fetched; and the gaps
    between the tokens of a running request beside a fetch, and beside a computed prompt."""
    table = "SGLang in device mode, Llama-3.1-8B's shape, klt"
    num_pages = sizes.prompts[0] // PAGE_TOKENS
    _ask(server, _prompt(10, sizes.prompts[0]))  # compiles kernels
    prompts = [_prompt(11 + index, size) for index, size in enumerate(sizes.prompts)]
    for prompt in prompts:
        for path in ("computed", "SGLang's own cache"):
            _record_ttft(record, table, path, len(prompt), _ask(server, prompt))
        num_pages += len(prompt) // PAGE_TOKENS
    started_s = time.monotonic()
    wait_until_written(server, num_pages, _WRITE_S)
    record.row("Writing what was left of the prompts", s=time.monotonic() - started_s, stored_mb=_stored_mb(store))
    for gbps in sizes.gbps:
        with _behind_link(store, gbps):
            for prompt in prompts:
                for _ in range(2):
                    server.flush()
                    answer = _ask(server, prompt)
                    link = f"fetched, {gbps:g} Gbps" if gbps else "fetched, no limit of the link"
                    _record_ttft(record, table, link, len(prompt), answer)
                    if int(answer.cached_tokens_details.get("storage", 0)) < len(prompt) - PAGE_TOKENS:
                        record.fail(f"of {len(prompt)} tokens, {answer.cached_tokens} were found")
    _measure_gaps(record, server, prompts[-1], sizes)


def _measure_gaps(record: Record, server: SGLangServer, prompt: list[int], sizes: Sizes) -> None:
    server.flush()
    ends: list[float] = []
    running = threading.Thread(target=_stream, args=(server, sizes.running, ends), daemon=True)
    running.start()

    def await_tokens() -> None:
        last = len(ends) + sizes.alone
        wait_until(lambda: len(ends) >= last or not running.is_alive())

    await_tokens()  # the first ones compile kernels
    activities: tuple[tuple[str, Callable[[], object]], ...] = (
        ("nothing", await_tokens),
        ("a fetch", lambda: _ask(server, prompt, new_tokens=1)),
        ("nothing again", await_tokens),
        ("a computed prompt", lambda: _ask(server, _prompt(20, len(prompt)), new_tokens=1)),
    )
    for beside, work in activities:
        first = len(ends)
        work()
        if gaps := [after - before for before, after in pairwise(ends[max(0, first - 1) :])]:
            record.row(
                "Gaps between the tokens of a running request",
                beside=beside,
                tokens=len(gaps),
                median_ms=1e3 * statistics.median(gaps),
                longest_ms=1e3 * max(gaps),
            )
    running.join()


def _stream(server: SGLangServer, num_tokens: int, ends: list[float]) -> None:
    """Ask for an answer of so many tokens, and note when each came."""
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body = json.dumps({"input_ids": _prompt(21, 130), "stream": True, "sampling_params": sampling}).encode()
    request = urllib.request.Request(server.url + "/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=2 * _REQUEST_S) as response:
        ends.extend(time.monotonic() for line in response if line.startswith(b"data: {"))


@contextmanager
def _behind_link(store: StoreProcess, gbps: float) -> Iterator[None]:
    """Start a store again behind a link of this speed, for a while. Leave it as it is if that is 0."""
    if not gbps:
        yield
        return
    store.stop()
    with StoreProcess(store.directory, port=store.port, link_gbps=(gbps,)):
        yield
    store.start()


def _record_ttft(record: Record, table: str, path: str, num_tokens: int, answer: Generation) -> None:
    record.row(table, path=path, tokens=num_tokens, ttft_ms=1e3 * answer.ttft_s, cached_tokens=answer.cached_tokens)


def _ask(server: SGLangServer, prompt: list[int], *, new_tokens: int = _NEW_TOKENS) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=new_tokens, logprobs=True)


def _gap(a: Generation, b: Generation) -> float:
    return max((abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=False)), default=0.0)


def _prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


def _stored_mb(store: StoreProcess) -> float:
    return sum(path.stat().st_size for path in store.directory.rglob("*") if path.is_file()) / 1e6
