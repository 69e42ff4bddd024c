"""Stand-ins for what SGLang compiles with ``load_jit``, by name and with its methods."""

from __future__ import annotations

from typing import Any

import torch

from . import kernels
from .finder import note


class NoStandInError(RuntimeError):
    """A kernel has no stand-in."""


class _ClampPosition:
    @staticmethod
    def clamp_position(out: torch.Tensor, seq_lens: torch.Tensor) -> None:
        out.copy_((seq_lens - 1).clamp(min=0))


class _FusedRope:
    def run_rope(self, q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> None:
        for x in (q, k):
            kernels.rope(x, cache, positions)

    def run_rope_store(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        cache: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        self.run_rope(q, k, cache, positions)
        kernels.store_rows(k, v, k_cache, v_cache, slots, -1)


class _RotaryEmbedding:
    @staticmethod
    def rotary_embedding(
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None,
        head_size: int,
        cache: torch.Tensor,
        is_neox: bool,
    ) -> None:
        assert is_neox
        for x in (query, key):
            if x is not None:
                heads = x.view(x.shape[0], -1, head_size)
                kernels.rope(heads, cache, positions.flatten())


class _KVCache:
    @staticmethod
    def store_cache(
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor,
        size_limit: int,
        skip: int,
    ) -> None:
        kernels.store_rows(k, v, k_cache, v_cache, slots, skip)


class _Activation:
    @staticmethod
    def run_activation(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
        if name != "silu":
            raise NoStandInError(f"activation {name} has no stand-in")
        kernels.silu_and_mul(x, out)


class _RMSNorm:
    @staticmethod
    def rmsnorm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
        kernels.rmsnorm(x, weight, eps, out)

    @staticmethod
    def fused_add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        kernels.fused_add_rmsnorm(x, residual, weight, eps)


_KINDS: dict[str, type] = {
    "kvcache": _KVCache,
    "activation": _Activation,
    "rmsnorm": _RMSNorm,
    "fused_add_rmsnorm": _RMSNorm,
    "rotary_embedding": _RotaryEmbedding,
    "clamp_position": _ClampPosition,
}


def load(name: str, *args: object, **options: object) -> Any:
    """Do what ``load_jit`` does. Raises NoStandInError."""
    if name == "fused_rope":
        assert str(args[0]).partition(",")[0].strip().lower() in ("true", "1"), f"not as NeoX rotates: {args}"
        return _FusedRope()
    kind = _KINDS.get(name)
    note(f"compiled kernel {name} {args}: {'a stand-in' if kind else 'NONE'}")
    if kind is None:
        raise NoStandInError(f"the compiled kernel {name} has no stand-in")
    return kind()
