"""Run a transformers model to produce a KV cache, and to predict the tokens that follow a given KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_kvfetch.codec.quant.rope import Rope, unrotate
from sgl_kvfetch.errors import ConfigError, UnsupportedError

_ROPE_TOKENS = 64

# A share of a key's length. On SmolLM2-135M, rounding to bfloat16 errs by at most 0.003, wrong pairs by 0.15 or more.
_MOST_ROPE_ERROR = 0.05

# SGLang and transformers compute these alike, and others, such as "dynamic", differently.
_SAME_IN_SGLANG = ("default", "linear", "llama3", "yarn")


class KVModel:
    """A causal language model of transformers with full attention or MLA.

    K and V have the shape ``(tokens, layers, heads, dim)`` everywhere. K is rotated, as in SGLang's pools. With MLA, K
    is the rotated part of the one vector that a token has in a layer, and V is the rest, the latent vector.
    """

    def __init__(self, path: str, *, device: str = "cpu", dtype: torch.dtype | None = torch.float32) -> None:
        """Load a model. ``path``: anything that transformers loads. float32 keeps rounding errors of the model itself
        out of small divergences. None is for gradients: bfloat16 if servers run the model in it and ``device``
        multiplies it several times as fast, or else float32.

        Raises ConfigError if nothing can be loaded, UnsupportedError if the attention has no plain K and V.
        """
        try:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        except ImportError as e:
            raise ConfigError(
                f"this needs transformers, which is not installed: pip install 'sgl-kvfetch[bench]' ({e})"
            ) from e
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
            dtype = dtype or _fast_dtype(AutoConfig.from_pretrained(path), device)
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        except (OSError, ValueError) as e:
            raise ConfigError(f"no model with a tokenizer at {path!r}: {str(e).splitlines()[0]}") from e
        self.path = path
        self.device = device
        self.start = prompt_start(self.tokenizer)
        self.model = model.eval().requires_grad_(False).to(device)
        self.config: Any = model.config.get_text_config()
        self._is_mla = getattr(self.config, "kv_lora_rank", None) is not None
        k, v = self.kv(torch.zeros(1, dtype=torch.long))
        self.num_layers, self.num_heads, self.k_head_dim = k.shape[1:]
        self.v_head_dim = v.shape[3]

    def compute_in(self, dtype: torch.dtype) -> None:
        """Convert the weights to ``dtype``. Quantised weights and buffers (rotary frequencies) stay as they are."""
        before = self.model.dtype
        for weight in self.model.parameters():
            if weight.dtype == before:
                weight.data = weight.data.to(dtype)

    def tokenise(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, ``(tokens,)`` int64, without ``start``."""
        return tokenise(self.tokenizer, text)

    def inverse_frequencies(self) -> list[torch.Tensor]:
        """Return the model's buffers of rotary frequencies, one number a pair of channels. Most models have them."""
        return [x for name, x in self.model.named_buffers() if name.rpartition(".")[2] == "inv_freq"]

    @torch.no_grad()
    def kv(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a sequence from its start. Raises UnsupportedError if the cache lacks any of them."""
        cache = self.model(ids[None].to(self.device), use_cache=True, logits_to_keep=1).past_key_values
        layers = getattr(cache, "layers", [])
        if any(getattr(layer, "keys", None) is None or layer.keys.ndim != 4 for layer in layers) or not layers:
            raise UnsupportedError(f"{self.path}: its cache does not hold keys and values of plain attention")
        fewest = min(layer.keys.shape[2] for layer in layers)
        if fewest != len(ids):
            raise UnsupportedError(
                f"{self.path}: its cache keeps {fewest} of {len(ids)} tokens, those in its sliding window; use fewer "
                "tokens of context"
            )
        if len({(layer.keys.shape, layer.values.shape) for layer in layers}) != 1:
            raise UnsupportedError(f"{self.path}: its layers have keys and values of different shapes")
        k = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers], 1)
        v = torch.stack([layer.values[0].transpose(0, 1) for layer in layers], 1)
        return self._of_cache(k, v) if self._is_mla else (k, v)

    def _of_cache(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of what transformers caches with MLA. Raises UnsupportedError."""
        if (latent.shape[2:], rotated.shape[2]) != ((1, self.config.kv_lora_rank), 1):
            raise UnsupportedError(f"{self.path}: this version of transformers does not cache MLA's latent vectors")
        if getattr(self.config, "rope_interleave", False):  # it moved channels 2i and 2i + 1 to the two halves
            rotated = torch.stack(rotated.chunk(2, -1), -1).flatten(-2)
        return rotated, latent

    def _to_cache(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if getattr(self.config, "rope_interleave", False):
            k = torch.cat((k[..., ::2], k[..., 1::2]), -1)
        return v, k

    def log_probabilities(self, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, ``(len(ids), vocabulary)`` float32, of the next token after each of ``ids``, which
        follow ``k`` and ``v``. Gradients flow to ``k`` and ``v`` if they require them."""
        from transformers import DynamicCache

        cache = DynamicCache()
        if self._is_mla:
            k, v = self._to_cache(k, v)
        dtype = self.model.dtype
        for layer in range(k.shape[1]):
            pair = (x[:, layer].transpose(0, 1)[None].to(self.device, dtype).contiguous() for x in (k, v))
            cache.update(*pair, layer)
        logits = self.model(ids[None].to(self.device), past_key_values=cache, use_cache=True).logits[0]
        return torch.log_softmax(logits.float(), -1)


def _fast_dtype(config: Any, device: str) -> torch.dtype:
    fast = device != "cpu" or any(torch.cpu.get_capabilities().get(name) for name in ("amx_bf16", "avx512_bf16"))
    return torch.bfloat16 if fast and config.get_text_config().dtype == torch.bfloat16 else torch.float32


def prompt_start(tokenizer: Any) -> torch.Tensor:
    """Return the tokens that a tokenizer puts before every text, ``(tokens,)`` int64: mostly a BOS token, often none.

    Attention sinks are at these tokens. The KV cache of a window without them differs from that of any real prompt.
    """
    whole, bare = (tokenizer("a", add_special_tokens=special).input_ids for special in (True, False))
    found = (first for first in range(len(whole)) if whole[first : first + len(bare)] == bare)
    return torch.tensor(whole[: next(found, 0)], dtype=torch.long)


def tokenise(tokenizer: Any, text: str) -> torch.Tensor:
    """Return a text's tokens, ``(tokens,)`` int64, without ``prompt_start``, even if the text itself contains it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    start = prompt_start(tokenizer).tolist()
    return torch.tensor(ids[len(start) :] if start and ids[: len(start)] == start else ids, dtype=torch.long)


def cut_windows(
    texts: Sequence[torch.Tensor], num_windows: int, window_tokens: int, start: torch.Tensor
) -> list[torch.Tensor]:
    """Cut ``num_windows`` windows of ``(window_tokens,)``, spread evenly over the texts' tokens.

    Each begins with ``start`` (see ``prompt_start``), as a prompt does. The rest is a piece of a text; pieces do not
    overlap. Raises ConfigError, naming the number found, if there are too few.
    """
    num_own = window_tokens - len(start)
    if num_own < 1:
        raise ConfigError(f"windows of {window_tokens} tokens hold only the start of every prompt: expected more")
    windows = [
        torch.cat((start, text[first : first + num_own]))
        for text in texts
        for first in range(0, len(text) - num_own + 1, num_own)
    ]
    if len(windows) < num_windows:
        raise ConfigError(
            f"the text has {len(windows)} windows of {window_tokens} tokens, expected {num_windows} or more; "
            "give more text, or ask for fewer or shorter windows"
        )
    return [windows[i * len(windows) // num_windows] for i in range(num_windows)]


def calibration_windows(
    model: KVModel, texts: Sequence[torch.Tensor], num_windows: int, window_tokens: int
) -> list[torch.Tensor]:
    """Return windows that begin as prompts do. Every other one is a user's message in the model's chat template, if the
    model has one. Raises ConfigError as ``cut_windows`` does."""
    plain = cut_windows(texts, num_windows, window_tokens, model.start)
    chat = chat_start(model.tokenizer)
    if not len(chat) or len(chat) > window_tokens // 4:
        return plain
    return [
        torch.cat((chat, window[len(model.start) :]))[:window_tokens] if i % 2 else window
        for i, window in enumerate(plain)
    ]


def chat_start(tokenizer: Any) -> torch.Tensor:
    """Return the tokens that the chat template, if any, puts before a user's first message, ``(tokens,)`` int64."""
    if not getattr(tokenizer, "chat_template", None):
        return torch.tensor([], dtype=torch.long)
    mark = "\N{SNOWMAN}"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    before, found, _ = text.partition(mark)
    ids: list[int] = tokenizer(before, add_special_tokens=False).input_ids if found else []
    return torch.tensor(ids, dtype=torch.long)


def part_of(text: torch.Tensor, part: str) -> torch.Tensor:
    """Return a part of a text's tokens, given as fractions ``FROM:TO``. Raises ConfigError."""
    first, end = fractions_of(part)
    return text[int(first * len(text)) : int(end * len(text))]


def fractions_of(part: str) -> tuple[float, float]:
    """Parse ``FROM:TO`` into two numbers. Raises ConfigError."""
    try:
        first, end = map(float, part.split(":"))
    except ValueError:
        first = end = -1.0
    if not 0 <= first < end <= 1:
        raise ConfigError(f"part {part!r}: expected FROM:TO with 0 <= FROM < TO <= 1, such as 0.5:1")
    return first, end


def find_rope(model: KVModel) -> Rope:
    """Return the rotation that a model applies to K last, alike in all layers and heads.

    Keys of one repeated token differ by their rotation alone: attention adds the same to each, since all values are
    equal. So the right rotation is the one without which all these keys are equal. A factor of the rotation, such as
    YaRN's, is not told apart from the keys themselves, and need not be.

    Raises UnsupportedError if the model's frequencies do not explain its keys, or if SGLang rotates differently.
    """
    parameters = getattr(model.config, "rope_parameters", None) or {}
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in _SAME_IN_SGLANG:
        raise UnsupportedError(f"rope type {rope_type!r} is not known; known are {', '.join(_SAME_IN_SGLANG)}")
    k = model.kv(torch.full((_ROPE_TOKENS,), model.config.vocab_size // 2))[0].float().cpu()
    lengths = k[:1].norm(dim=-1)
    for frequencies in model.inverse_frequencies():
        if 2 * len(frequencies) > k.shape[-1]:
            continue
        for interleaved in (False, True):
            rope = Rope(inv_freq=tuple(frequencies.float().tolist()), interleaved=interleaved)
            plain = unrotate(k, rope.table(0, _ROPE_TOKENS, k.device), rope)
            if bool(((plain - plain[:1]).norm(dim=-1) < _MOST_ROPE_ERROR * lengths).all()):
                return rope
    raise UnsupportedError("no rotation by the model's frequencies explains its keys in all layers")
