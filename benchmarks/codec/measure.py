"""Measures how a model's predictions change if it continues from restored KV."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.codec.kv_model import KVModel
from benchmarks.codec.method import KV_DTYPE, KVShape, Method
from benchmarks.stats import Estimate, estimate
from sgl_kvfetch.errors import QuantiseError, UnsupportedError

_ROWS_AT_ONCE = 64  # bounds the memory for distributions in float64


@dataclass(frozen=True)
class Sample:
    """One method on one window. ``kl``, ``dnll``, ``top1``: as in ``Row``, means over the continuation's tokens."""

    coded_bytes: int
    bits_per_value: float
    encode_s: float
    decode_s: float
    kl: float
    dnll: float
    top1: float


@dataclass(frozen=True)
class Row:
    """One method over all windows. Speeds are in megabytes (10^6) of raw bfloat16 per second."""

    name: str
    family: str
    bits_per_value: Estimate
    ratio: float  # bfloat16's bits divided by this method's
    kl: Estimate  # nats, from the distribution after exact KV to the one after restored KV
    dnll: Estimate  # additional nats per token, compared with exact KV
    top1: Estimate  # share of tokens with equal top predictions
    encode_mb_s: float
    decode_mb_s: float
    samples: Sequence[Sample]


@dataclass(frozen=True)
class Measured:
    shape: KVShape  # of one window
    nll: Estimate  # after exact KV
    rows: tuple[Row, ...]
    left_out: dict[str, str]  # methods that cannot encode this model's KV, and why


def measure(
    model: KVModel,
    windows: Sequence[torch.Tensor],
    context_tokens: int,
    methods: Sequence[Method],
    on_step: Callable[[str], None] = lambda name: None,
) -> Measured:
    """Encode and restore the KV of each window's context with each method, and let the model continue from it.

    ``windows``: ``(context_tokens + continuation + 1,)`` ids. The reference is the model's KV of the context, rounded
    to bfloat16, so a lossless method has a KL of 0. ``on_step`` gets the name of each method before it runs on a
    window. A method that cannot encode this KV is left out.
    """
    samples: dict[str, list[Sample]] = {method.name: [] for method in methods}
    shape: KVShape | None = None
    nlls = []
    left_out: dict[str, str] = {}
    for ids in windows:
        context, continuation, following = ids[:context_tokens], ids[context_tokens:-1], ids[context_tokens + 1 :]
        k, v = (x.to(KV_DTYPE).cpu() for x in model.kv(context))
        shape = KVShape.of(k, v)
        exact = _continue(model, k, v, continuation)
        reference, exact_nll = _Reference(exact), _nll(exact, following)
        nlls.append(exact_nll)
        for method in methods:
            on_step(method.name)
            if method.name in left_out:
                continue
            try:
                coded = method.code(k, v)
            except (UnsupportedError, QuantiseError) as e:
                left_out[method.name] = str(e)
                continue
            restored = _continue(model, coded.k, coded.v, continuation)
            samples[method.name].append(
                Sample(
                    coded.num_bytes,
                    coded.bits_per_value,
                    coded.encode_s,
                    coded.decode_s,
                    reference.kl(restored),
                    _nll(restored, following) - exact_nll,
                    float((exact.argmax(1) == restored.argmax(1)).double().mean()),
                )
            )
    assert shape is not None
    rows = tuple(_row(m, samples[m.name], shape) for m in methods if m.name not in left_out)
    return Measured(shape, estimate(nlls), rows, left_out)


@torch.no_grad()
def _continue(model: KVModel, k: torch.Tensor, v: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return model.log_probabilities(k, v, ids).cpu()


def _nll(log_probabilities: torch.Tensor, following: torch.Tensor) -> float:
    return float(-log_probabilities.gather(1, following[:, None]).double().mean())


class _Reference:
    """Log probabilities ``(tokens, vocabulary)`` that others are compared with: by far most of the time of a benchmark
    goes there if a vocabulary is large, so what all comparisons need is computed once."""

    def __init__(self, exact: torch.Tensor) -> None:
        self._probabilities = exact.double().exp_()
        self._negative_entropy = self._mean(exact)

    def kl(self, others: torch.Tensor) -> float:
        """Return the divergence of others from these, in nats per token."""
        return self._negative_entropy - self._mean(others)

    def _mean(self, log_probabilities: torch.Tensor) -> float:
        pairs = zip(*(torch.split(x, _ROWS_AT_ONCE) for x in (self._probabilities, log_probabilities)), strict=True)
        return sum(float(p.flatten() @ q.double().flatten()) for p, q in pairs) / len(log_probabilities)


def _row(method: Method, samples: Sequence[Sample], shape: KVShape) -> Row:
    bits = estimate([s.bits_per_value for s in samples])
    raw_mb = shape.raw_bytes * len(samples) / 1e6
    return Row(
        name=method.name,
        family=method.family,
        bits_per_value=bits,
        ratio=KV_DTYPE.itemsize * 8 / bits.mean,
        kl=estimate([s.kl for s in samples]),
        dnll=estimate([s.dnll for s in samples]),
        top1=estimate([s.top1 for s in samples]),
        encode_mb_s=raw_mb / sum(s.encode_s for s in samples),
        decode_mb_s=raw_mb / sum(s.decode_s for s in samples),
        samples=samples,
    )
