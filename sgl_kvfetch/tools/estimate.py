"""``kvfetch estimate``: what a store would save for a model, a link and an engine, by arithmetic."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Struct
from rich.table import Table

from sgl_kvfetch.errors import DECODE_ERRORS, ConfigError
from sgl_kvfetch.tools.terminal import format_ratio, format_size, json_flag, make_table, option, show
from sgl_kvfetch.user_files import read_text

LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
_DECODE_THREADS = 8  # the default of the config key codec_threads on 16 cores or more
_KV_BYTES = 2  # a value of bfloat16 or float16
# docs/gpus.md: `klt` over a link without a limit, and computing. A test compares it with the arithmetic.
MEASURED = (
    "These times are what link and decoding threads allow at best, which two CPU cores come near and a GPU server does "
    "not yet: on an H200, 8,192 tokens of Llama-3.1-8B took 0.637 s to fetch with klt, where this arithmetic says "
    "0.265 s, and 0.274 s to compute. Measure yours with kvfetch bench (docs/gpus.md)."
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LINK = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([MG])bps")


class Coding(NamedTuple):
    """How small values become, and how fast a thread of a CPU decodes them (docs/codec.md)."""

    bits_per_value: float
    decoded_bps: float  # bytes a second of raw KV, by one thread with AVX-512
    source: str
    loaded_bps: float = 0.0  # the same of a GPU, copies included, as docs/kernels.md predicts


CODINGS = {
    "raw": Coding(16.0, inf, "the KV cache as it is"),
    "exact": Coding(10.41, 1.4e9, "SmolLM2-135M, exact/ans", 75e9),
    "uint8": Coding(6.78, 656e6, "SmolLM2-135M, uint8/ans"),
    "klt": Coding(1.25, 624e6, "SmolLM2-135M and Qwen2.5-Coder-1.5B, klt/ans at the default target_kl", 238e9),
}


class CodingEstimate(Struct, frozen=True):
    """Times to first token are by prompt length, in tokens. ``break_even_tokens``: None if computing is faster."""

    bytes_per_token: float
    source: str
    ttft_s: dict[int, float]
    break_even_tokens: int | None
    stored_bytes: float


class Estimate(Struct, frozen=True):
    verdict: str
    gpu_s: dict[str, float]  # until a prompt's first token if a GPU restores it
    computing_s: dict[int, float]
    codings: dict[str, CodingEstimate]


def estimate(
    model: Annotated[str, option("CONFIG", "A model's config.json, or the folder with it.", show_default=False)],
    link: Annotated[str, option("RATE", "Goodput of the store's link, such as 10Gbps.", show_default=False)],
    prefill_tps: Annotated[
        float, option("TOKENS", "Prefill speed of the engine, in tokens per second.", min=1, show_default=False)
    ],
    batch_s: Annotated[
        float,
        option(
            "SECONDS",
            "Time of one batch, which computes the end of a fetched prompt. The default is a guess.",
            "--batch",
            min=0,
        ),
    ] = 0.05,
    prompts: Annotated[float, option("COUNT", "New prompts a day, of all users.", min=0)] = 2000.0,
    tokens: Annotated[int, option("COUNT", "Tokens of such a prompt.", min=1)] = 4096,
    days: Annotated[float, option("DAYS", "How long prompts stay.", min=0)] = 7.0,
    as_json: Annotated[bool, json_flag(Estimate)] = False,
) -> None:
    """Estimate whether fetching is faster than prefill, and how large a store would be.

    A fetch takes the longer one of transmitting and decoding, and then one batch. The engine computes as many tokens a
    second at every length, which favours computing for long prompts. Bits per value and decoding speeds were measured
    on two small models (docs/codec.md): measure yours with kvfetch calibrate. All layers count as full attention or
    MLA. Nothing is connected to. On a GPU, fetches have taken more than twice as long (docs/gpus.md).

    Example:

        kvfetch estimate --model /models/llama --link 10Gbps --prefill-tps 8000 --prompts 10000 --days 30
    """
    values = values_per_token(model)
    bytes_per_s = parse_link(link) / 8
    codings, prompt_s = {}, {}
    for name, coding in CODINGS.items():
        token_bytes = values * coding.bits_per_value / 8
        token_s = max(token_bytes / bytes_per_s, values * _KV_BYTES / (coding.decoded_bps * _DECODE_THREADS))
        saved_s = 1 / prefill_tps - token_s  # a token
        prompt_s[name] = tokens * token_s + batch_s
        codings[name] = CodingEstimate(
            token_bytes,
            coding.source,
            {length: length * token_s + batch_s for length in LENGTHS},
            ceil(batch_s / saved_s) if saved_s > 0 else None,
            prompts * days * tokens * token_bytes,
        )
    verdict = _verdict(codings, prompt_s, tokens, tokens / prefill_tps)
    gpu_s = {}
    for name in ("exact", "klt"):  # loading begins when all is there
        token_s = codings[name].bytes_per_token / bytes_per_s + values * _KV_BYTES / CODINGS[name].loaded_bps
        gpu_s[name] = tokens * token_s + batch_s
    found = Estimate(verdict, gpu_s, {length: length / prefill_tps for length in LENGTHS}, codings)
    show(found, as_json, _lines(found, f"{prompts:g} prompts of {tokens} tokens a day, {days:g} days"))


def _verdict(
    codings: Mapping[str, CodingEstimate], fetched_s: Mapping[str, float], tokens: int, computing_s: float
) -> str:
    """Return whether a store is worth it for prompts of so many tokens, by the times of what servers may store."""
    said = ", ".join(f"{fetched_s[name]:.3g} s to fetch with {name}" for name in ("exact", "klt"))
    compared = f"a prompt of {tokens:,} tokens takes {computing_s:.3g} s to compute, {said}"
    if fetched_s["exact"] < computing_s:
        return f"worth it: {compared}"
    if fetched_s["klt"] < computing_s:
        return f"worth it with klt alone: {compared}"
    starts = [coding.break_even_tokens for coding in codings.values() if coding.break_even_tokens is not None]
    longer = f"; longer ones than {min(starts):,} tokens would be fetched faster" if starts else ""
    return f"not worth it: {compared}{longer}"


def values_per_token(model: str) -> int:
    """Return how many values of KV a token has, by a model's config.json. Raises ConfigError."""
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    try:
        config = msgspec.json.decode(read_text(path, "--model"), type=dict[str, Any])
    except ConfigError as e:
        if _HUB_NAME.fullmatch(model):
            download = f"hf download {model} config.json --local-dir {model.rpartition('/')[2]}"
            raise ConfigError(f"{e}; for a model of the Hugging Face Hub, type {download}, and give that folder") from e
        raise ConfigError(f"{e}; expected a config.json, or a folder with one") from e
    except DECODE_ERRORS as e:
        raise ConfigError(f"--model {model}: {path} is not a model's config.json: {e}") from e
    config = config.get("text_config", config)
    layers = _positive(config, path, "num_hidden_layers", "n_layer")
    if config.get("kv_lora_rank") is not None:  # MLA: one vector a layer, whatever the number of heads
        return layers * (_positive(config, path, "kv_lora_rank") + _positive(config, path, "qk_rope_head_dim"))
    query_heads = _positive(config, path, "num_attention_heads", "n_head")
    heads = _positive(config, path, "num_key_value_heads") if config.get("num_key_value_heads") else query_heads
    head_dim = config.get("head_dim") or _positive(config, path, "hidden_size", "n_embd") // query_heads
    return 2 * layers * heads * int(head_dim)


def _positive(config: Mapping[str, Any], path: Path, *names: str) -> int:
    """Return the value of the first key that is there. Raises ConfigError."""
    value = next((config[name] for name in names if name in config), None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {names[0]} is {value!r}; expected a number of at least 1")
    return value


def parse_link(text: str) -> float:
    """Return bits a second. Raises ConfigError."""
    match = _LINK.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise ConfigError(f"--link {text!r}: expected a form such as 10Gbps or 500Mbps")
    return float(match[1]) * {"M": 1e6, "G": 1e9}[match[2]]


def _lines(found: Estimate, use: str) -> Iterator[Table | str]:
    """Yield an estimate as a verdict and tables: seconds to the first token, and what the store holds."""
    yield found.verdict
    yield MEASURED
    on_gpu = ", ".join(f"{seconds:.3g} s with {name}" for name, seconds in found.gpu_s.items())
    yield f"If a GPU restores, such a prompt would take {on_gpu}: docs/kernels.md, not measured."
    raw, codings = found.codings["raw"], found.codings.items()
    times = make_table(("tokens of a prompt",), ("computed", *(f"fetched, {name}" for name in found.codings)))
    times.title = "Seconds to the first token"
    for length, computing_s in found.computing_s.items():
        fetched = (f"{coding.ttft_s[length]:.3g}" for coding in found.codings.values())
        times.add_row(f"{length:,}", f"{computing_s:.3g}", *fetched)
    yield times
    store = make_table(("",), ("bytes per token", "smaller", "fetching wins from", "stored"))
    store.title = f"The store: {use}"
    for name, coding in codings:
        tokens = "never" if coding.break_even_tokens is None else f"{coding.break_even_tokens:,} tokens"
        smaller = format_ratio(raw.bytes_per_token / coding.bytes_per_token)
        size = format_size(round(coding.stored_bytes))
        store.add_row(name, f"{coding.bytes_per_token:,.0f}", smaller, tokens, size)
    yield store
    for name, coding in codings:
        yield f"{name}: {coding.source}"
    yield "Sizes and speeds: docs/codec.md."
