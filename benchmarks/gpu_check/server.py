"""Checks and measures SGLang in device mode on the GPU, where its `sgl_kernel` is missing with stand-ins.

A small Llama stores with `exact`: a prefix that is fetched must give the answer that SGLang's own cache gives. (A
computed prompt adds up in another order, so its log probabilities differ in either case.) A model of Llama-3.1-8B's
shape with random weights stores with `exact`, and with `klt` in a profile that nobody calibrated: its times count, not
its answers. One server attaches one after the other, since a start takes longer than what is measured. Another one has
SGLang's own host tier, for the same prompts.
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
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.flat_profile import flat_profile
from benchmarks.gpu_check.record import Record, SkippedError
from harness import sglang_standins
from harness.attaching import attach, detach
from harness.engine import Generation, SGLangServer, device_args, host_tier_args
from harness.metrics import wait_until_written, written_pages
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
_HOST_TIER_GB = 16
_STEP = 1.5  # about 1.5 bits per value, of values with a standard deviation of 1


@dataclass(frozen=True)
class Sizes:
    """What the large model is measured with. Lengths are in tokens. ``gbps`` has speeds of the link; 0 is no limit.
    ``pool``: of the engine's, which has room for a few prompts."""

    prompts: Sequence[int] = (8192, 32768)
    gbps: Sequence[float] = (0, 10)
    pool: int = 81920
    memory_cache: str = "4GiB"
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
            args = [*_large_flags(flags, sizes), *device_args(store.url, **_CONFIG, model_id=_RANDOM_8B)]
            with _server(make_llama_8b_config(folder / "model"), args, env) as server:
                detach(server)
                measure(record, server, store, folder / "profile", sizes)


def run_host_tier(record: Record) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder, sizes = Path(temporary), Sizes()
        env, flags = prepare(record, folder)
        args = [*_large_flags(flags, sizes), *host_tier_args(host_pool_gb=_HOST_TIER_GB)]
        with _server(make_llama_8b_config(folder / "model"), args, env) as server:
            measure_host_tier(record, server, sizes)


_RANDOM_8B = "random-8b"


def _large_flags(flags: Sequence[str], sizes: Sizes) -> list[str]:
    return [
        *flags,
        *("--load-format", "dummy", "--max-running-requests", "8", "--mem-fraction-static", "0.9"),
        *("--chunked-prefill-size", "8192", "--context-length", str(max(sizes.prompts) + 2048)),
        *("--max-total-tokens", str(sizes.pool)),
    ]


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
    return SGLangServer(model, extra_args=args, env=env, admin_api_key="admin", **limits)  # type: ignore[arg-type]


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


_TIMES = "Llama-3.1-8B's shape: time to the first token"


def measure(record: Record, server: SGLangServer, store: StoreProcess, profile: Path, sizes: Sizes) -> None:
    """Record the time to the first token of prompts that are computed, in SGLang's own cache, fetched, and in
    `memory_cache`; and the gaps between the tokens of a running request beside a fetch, and beside a computed prompt.
    No store is attached before or after. Each link has a data plane of its own, since `memory_cache` has what the last
    one fetched."""
    prompts = _prompts(sizes)
    _ask(server, _prompt(10, sizes.prompts[0]))  # compiles kernels
    codings: dict[str, dict[str, Any]] = {"exact": {}, "klt": {"profile": str(profile)}}
    for quantiser, more in codings.items():
        config = {"quantiser": quantiser, "model_id": _RANDOM_8B, "memory_cache": sizes.memory_cache} | more

        @contextmanager
        def attached(config: dict[str, Any] = config, **others: Any) -> Iterator[None]:
            server.flush()
            attach(server, store.url, **_CONFIG, **config, **others)
            yield
            server.flush()
            detach(server)

        with attached():
            before_mb, written = _stored_mb(store), written_pages(server)
            for prompt in prompts:
                for path in ("computed", "SGLang's own cache"):
                    _record_ttft(record, quantiser, path, _ask(server, prompt), prompt)
            started_s, num_pages = time.monotonic(), sum(map(len, prompts)) // PAGE_TOKENS
            try:
                wait_until_written(server, written + num_pages, _WRITE_S)
            except TimeoutError as e:
                record.fail(f"{quantiser}: {str(e).splitlines()[0]} within {_WRITE_S:g} s")
            record.row(
                "Writing what was left of the prompts",
                quantiser=quantiser,
                s=time.monotonic() - started_s,
                stored_mb=_stored_mb(store) - before_mb,
            )
        for gbps, recompute in product(sizes.gbps, ("never", "auto")):
            with _behind_link(store, gbps), attached(recompute=recompute):
                for prompt in prompts:
                    link = f"{gbps:g} Gbps" if gbps else "no limit of the link"
                    path = f"fetched, {link}" if recompute == "never" else f"what `auto` chooses, {link}"
                    _fetch(record, server, quantiser, path, prompt, may_compute=recompute == "auto")
                    if recompute == "never" and not gbps:
                        server.flush()
                        _fetch(record, server, quantiser, "`memory_cache`", prompt)
        with attached(recompute="never"):
            _measure_gaps(record, server, quantiser, prompts[-1], sizes)


def measure_host_tier(record: Record, server: SGLangServer, sizes: Sizes) -> None:
    """Record the time to the first token of the same prompts from SGLang's host tier: others have taken their place in
    the pool."""
    prompts = _prompts(sizes)
    _ask(server, _prompt(10, sizes.prompts[0]))  # compiles kernels
    for prompt in prompts:
        _record_ttft(record, "raw", "computed, with a host tier", _ask(server, prompt), prompt)
    for seed in range(30, 31 + sizes.pool // max(sizes.prompts)):
        _ask(server, _prompt(seed, max(sizes.prompts)), new_tokens=1)
    for prompt in prompts:
        answer = _ask(server, prompt)
        _record_ttft(record, "raw", "SGLang's host tier", answer, prompt)
        if int(answer.cached_tokens_details.get("host", 0)) < len(prompt) - 2 * PAGE_TOKENS:
            record.note(f"of {len(prompt)} tokens, the host tier had {answer.cached_tokens_details}")


def _fetch(
    record: Record, server: SGLangServer, quantiser: str, path: str, prompt: list[int], may_compute: bool = False
) -> None:
    answer = _ask(server, prompt)
    _record_ttft(record, quantiser, path, answer, prompt)
    if not may_compute and int(answer.cached_tokens_details.get("storage", 0)) < len(prompt) - PAGE_TOKENS:
        record.fail(f"{quantiser}, {path}: of {len(prompt)} tokens, {answer.cached_tokens} were found")


def _prompts(sizes: Sizes) -> list[list[int]]:
    return [_prompt(11 + index, size) for index, size in enumerate(sizes.prompts)]


def _measure_gaps(record: Record, server: SGLangServer, quantiser: str, prompt: list[int], sizes: Sizes) -> None:
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
                quantiser=quantiser,
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
    with StoreProcess(store.directory, port=store.port, link_gbps=gbps):
        yield
    store.start()


def _record_ttft(record: Record, quantiser: str, path: str, answer: Generation, prompt: list[int]) -> None:
    ttft_ms, found = 1e3 * answer.ttft_s, answer.cached_tokens
    record.row(_TIMES, quantiser=quantiser, path=path, tokens=len(prompt), ttft_ms=ttft_ms, cached_tokens=found)


def _ask(server: SGLangServer, prompt: list[int], *, new_tokens: int = _NEW_TOKENS) -> Generation:
    return server.generate(input_ids=prompt, max_new_tokens=new_tokens, logprobs=True)


def _gap(a: Generation, b: Generation) -> float:
    return max((abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=False)), default=0.0)


def _prompt(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(num_tokens)]


def _stored_mb(store: StoreProcess) -> float:
    return sum(path.stat().st_size for path in store.directory.rglob("*") if path.is_file()) / 1e6
