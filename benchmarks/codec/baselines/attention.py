"""What attention does with keys and values, measured once a model, and the methods that are fitted to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.codec.baselines.rotation import only_rope
from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE, Shape, TensorMethod, from_bytes, to_bytes
from sgl_kvfetch.codec.calibrate.layers import LayeredModel
from sgl_kvfetch.codec.quant.rope import Rope
from sgl_kvfetch.errors import ConfigError, UnsupportedError
from sgl_kvfetch.types import TensorName

SINK_TOKENS = 4
_NOTED = "kvfetch_noted"


@dataclass(frozen=True)
class AttentionStatistics:
    """Means over tokens without the first ones, the sinks; and over the query heads that read a KV head.

    queries: second moments of rotated queries, float64 ``(layers, heads, dim, dim)``. keys: mean squares of keys,
    ``(layers, heads, dim)``. values: second moments of values, ``(layers, heads, v_dim, v_dim)``, where each token
    counts as its key does for attention: by the mean square of its products with the queries.
    """

    rope: Rope
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


def gather(
    model: KVModel, windows: Sequence[torch.Tensor], on_step: Callable[[str], None] = lambda what: None
) -> AttentionStatistics:
    """Measure with one forward pass for each of ``windows``, ``(tokens,)`` ids. ``on_step``: called before each.

    Raises ConfigError if a window has only sinks, UnsupportedError if transformers does not show the model's queries.
    """
    found: list[AttentionStatistics] = []
    rope = only_rope(LayeredModel(model.path, device=model.device))
    for ids in windows:
        on_step("attention")
        if len(ids) <= SINK_TOKENS:
            raise ConfigError(f"a window has {len(ids)} tokens; expected more than {SINK_TOKENS}")
        found.append(_of_window(model, ids, rope))
    moments = (torch.stack([getattr(s, name) for s in found]).mean(0) for name in ("queries", "keys", "values"))
    return AttentionStatistics(rope, *moments)


@torch.no_grad()
def _of_window(model: KVModel, ids: torch.Tensor, rope: Rope) -> AttentionStatistics:
    layers: dict[int, tuple[torch.Tensor, ...]] = {}
    with _noting(model.model, lambda layer, q, k, v: layers.__setitem__(layer, _moments(q, k, v))):
        model.model(ids[None].to(model.device), use_cache=False, logits_to_keep=1)
    expected = (model.num_heads, model.k_head_dim)
    if len(layers) != model.num_layers or layers[0][1].shape != expected:
        raise UnsupportedError(f"{model.path}: its attention does not show queries and keys as {expected} heads")
    return AttentionStatistics(rope, *(torch.stack([layers[i][j] for i in sorted(layers)]) for j in range(3)))


def _moments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return a layer's `AttentionStatistics`: queries, keys and values. ``q``: ``(query heads, tokens, dim)``; ``k``,
    ``v``: ``(heads, tokens, dim)``."""
    q, k, v = (x[:, SINK_TOKENS:].double().cpu() for x in (q, k, v))
    q = q.reshape(len(k), -1, q.shape[-1])  # the query heads of a KV head follow each other
    queries = q.transpose(1, 2) @ q / q.shape[1]
    weights = ((k @ queries) * k).sum(-1, keepdim=True)
    weights = weights / weights.sum(1, keepdim=True)
    return queries, k.square().mean(1), (v * weights).transpose(1, 2) @ v


@contextmanager
def _noting(model: Any, note: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """Call ``note`` with each layer's number, rotated queries, keys and values, ``(heads, tokens, dim)``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        note(module.layer_idx, q[0], k[0], v[0])
        return sdpa_attention_forward(module, q, k, v, *args, **kwargs)

    usual = model.config._attn_implementation
    AttentionInterface.register(_NOTED, attend)
    AttentionMaskInterface.register(_NOTED, sdpa_mask)
    model.set_attn_implementation(_NOTED)
    try:
        yield
    finally:
        model.set_attn_implementation(usual)


class AttentionMethod(TensorMethod):
    """A method that is fitted to attention's statistics, and keeps some first and last tokens exact.

    Set ``statistics``, which ``gather`` returns, before you encode anything. A model has one; like our profile, its
    bytes are not counted. The exact tokens are.
    """

    def __init__(self, first_exact: int, last_exact: int) -> None:
        self._statistics: AttentionStatistics | None = None
        self._first_exact, self._last_exact = first_exact, last_exact

    @property
    def statistics(self) -> AttentionStatistics:
        assert self._statistics is not None, self.name
        return self._statistics

    @statistics.setter
    def statistics(self, statistics: AttentionStatistics) -> None:
        self._statistics = statistics
        self.prepare(statistics)

    @abstractmethod
    def prepare(self, statistics: AttentionStatistics) -> None:
        """Compute what encoder and decoder need. Raises UnsupportedError for a model that the method cannot encode."""

    @abstractmethod
    def encode_rest(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        """Yield all bytes to store for tokens that are not exact, float32 ``(tokens, layers, heads, dim)``."""

    @abstractmethod
    def decode_rest(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        """Invert ``encode_rest``, up to rounding."""

    def encode_tensor(self, tensor: TensorName, values: torch.Tensor) -> Iterator[bytes]:
        rest = self._rest(len(values))
        for exact in (values[: rest.start], values[rest.stop :]):
            if len(exact):
                yield to_bytes(exact)
        if rest.start < rest.stop:
            yield from self.encode_rest(tensor, values[rest].float())

    def decode_tensor(self, tensor: TensorName, parts: Iterator[bytes], shape: Shape) -> torch.Tensor:
        values = torch.empty(shape, dtype=KV_DTYPE)
        rest = self._rest(len(values))
        for exact in (values[: rest.start], values[rest.stop :]):
            if len(exact):
                exact.copy_(from_bytes(next(parts), KV_DTYPE, exact.shape))
        if rest.start < rest.stop:
            coded = values[rest]
            num_tokens, num_layers, num_heads, dim = coded.shape
            coded.copy_(self.decode_rest(tensor, parts, (num_tokens, num_layers, num_heads, dim)))
        return values

    def _rest(self, num_tokens: int) -> slice:
        first = min(self._first_exact, num_tokens)
        return slice(first, max(first, num_tokens - self._last_exact))
