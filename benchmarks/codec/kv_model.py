"""Run a whole transformers model on windows of text: produce their KV cache, and predict what follows a given one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sgl_kvfetch.codec.calibrate.layers import cached_latent, latent_kv
from sgl_kvfetch.codec.calibrate.text import cut_windows, part_of, prompt_start, tokenise
from sgl_kvfetch.errors import ConfigError, UnsupportedError


class KVModel:
    """A causal language model of transformers with full attention or MLA.

    K and V have the shape ``(tokens, layers, heads, dim)`` everywhere. K is rotated, as in SGLang's pools. With MLA, K
    is the rotated part of the one vector that a token has in a layer, and V is the rest, the latent vector.
    """

    def __init__(self, path: str) -> None:
        """Load a model. ``path``: anything that transformers loads. It runs in float32, which keeps rounding errors of
        the model itself out of small divergences.

        Raises ConfigError if nothing can be loaded, UnsupportedError if the attention has no plain K and V.
        """
        try:
            from transformers import AutoModelForCausalLM, AutoTokenizer
        except ImportError as e:
            raise ConfigError(
                f"this needs transformers, which is not installed: pip install '.[bench]' in a checkout ({e})"
            ) from e
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        except (OSError, ValueError) as e:
            raise ConfigError(f"no model with a tokenizer at {path!r}: {str(e).splitlines()[0]}") from e
        self.path = path
        self.start = prompt_start(self.tokenizer)
        self.model = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self._is_mla = getattr(self.config, "kv_lora_rank", None) is not None
        k, v = self.kv(torch.zeros(1, dtype=torch.long))
        self.num_layers, self.num_heads, self.k_head_dim = k.shape[1:]
        self.v_head_dim = v.shape[3]

    def tokenise(self, text: str) -> torch.Tensor:
        """Return the tokens of a text, ``(tokens,)`` int64, without ``start``."""
        return tokenise(self.tokenizer, text)

    @torch.no_grad()
    def kv(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of a sequence from its start. Raises UnsupportedError if the cache lacks any of them."""
        from transformers import DynamicCache

        cache = DynamicCache()  # the model's own keeps the last tokens alone where a layer has a sliding window
        try:
            self.model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1)
        except (IndexError, ValueError) as e:  # there is no place for states of another kind
            raise UnsupportedError(f"{self.path}: its cache holds more than keys and values: {e}") from e
        layers = cache.layers
        if any(layer.keys is None or layer.keys.ndim != 4 for layer in layers) or not layers:
            raise UnsupportedError(f"{self.path}: its cache does not hold keys and values of plain attention")
        if len({(layer.keys.shape, layer.values.shape) for layer in layers}) != 1:
            raise UnsupportedError(f"{self.path}: its layers have keys and values of different shapes")
        k = torch.stack([layer.keys[0].transpose(0, 1) for layer in layers], 1)
        v = torch.stack([layer.values[0].transpose(0, 1) for layer in layers], 1)
        return latent_kv(k, v, self.config, self.path) if self._is_mla else (k, v)

    def log_probabilities(self, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return log probabilities, ``(len(ids), vocabulary)`` float32, of the next token after each of ``ids``, which
        follow ``k`` and ``v``."""
        from transformers import DynamicCache

        cache = DynamicCache()
        if self._is_mla:
            k, v = cached_latent(k, v, self.config)
        for layer in range(k.shape[1]):
            pair = (x[:, layer].transpose(0, 1)[None].float().contiguous() for x in (k, v))
            cache.update(*pair, layer)
        logits = self.model(ids[None], past_key_values=cache, use_cache=True).logits[0]
        return torch.log_softmax(logits.float(), -1)


def windows_of(model: KVModel, texts: Sequence[str], part: str, count: int, length: int) -> list[torch.Tensor]:
    """Cut ``count`` windows of ``(length,)`` ids from a part of each text.

    Raises ConfigError if the texts are too short, or if the model has fewer than ``length`` positions.
    """
    windows = cut_windows([part_of(model.tokenise(text), part) for text in texts], count, length, model.start)
    most = getattr(model.config, "max_position_embeddings", None)
    if most is not None and length > most:
        raise ConfigError(f"windows have {length} tokens; the model has only {most} positions")
    return windows
