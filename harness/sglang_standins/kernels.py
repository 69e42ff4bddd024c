"""What a Llama needs of SGLang's CUDA kernels, in PyTorch: RMSNorm, SwiGLU, RoPE, and storing K and V.

`load` takes the place of ``load_jit``, by whose names and methods SGLang calls what it compiles.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from .finder import note


class NoStandInError(RuntimeError):
    """A kernel has no stand-in."""


def rmsnorm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, out: torch.Tensor | None = None, enable_pdl: Any = None
) -> torch.Tensor:
    """Normalise rows ``(..., size)``, and multiply them by ``weight``."""
    normalised = functional.rms_norm(x, x.shape[-1:], weight, eps)
    return normalised if out is None else out.copy_(normalised)


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, enable_pdl: Any = None
) -> None:
    """Add ``x`` to ``residual``, and write the normalised sum to ``x``."""
    rmsnorm(residual.add_(x), weight, eps, x)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: Any = None) -> torch.Tensor:
    """Multiply the second half of rows by the SiLU of the first."""
    gate, up = x.chunk(2, dim=-1)
    return torch.mul(functional.silu(gate), up, out=out)


def rope(x: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> None:
    """Rotate ``x``, ``(tokens, heads, dim)``, in place, as NeoX does: the halves of a head against each other.
    ``cache``: cosines, then sines, by position."""
    half = cache.shape[-1] // 2
    cos, sin = cache[positions].float()[:, None].chunk(2, dim=-1)
    first, second = (x[..., start : start + half] for start in (0, half))
    a, b = first.float(), second.float()
    turned = a * cos - b * sin, b * cos + a * sin
    first.copy_(turned[0])
    second.copy_(turned[1])


def _store_cache(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, *_: int
) -> None:
    """Store K and V of tokens in their slots. That of padding, which SGLang leaves out, is nobody's."""
    for x, cache in ((k, k_cache), (v, v_cache)):
        cache[slots] = x.reshape(len(slots), *cache.shape[1:])


class _FusedRope:
    def run_rope(self, q: torch.Tensor, k: torch.Tensor, cache: torch.Tensor, positions: torch.Tensor) -> None:
        for x in (q, k):
            rope(x, cache, positions)

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
        _store_cache(k, v, k_cache, v_cache, slots)


def _rotate(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None, size: int, cache: torch.Tensor, is_neox: bool
) -> None:
    assert is_neox
    for x in (q, k):
        if x is not None:
            rope(x.view(x.shape[0], -1, size), cache, positions.flatten())


def _activate(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    if name != "silu":
        raise NoStandInError(f"activation {name} has no stand-in")
    silu_and_mul(x, out)


_NORM = SimpleNamespace(
    rmsnorm=lambda x, weight, out, eps: rmsnorm(x, weight, eps, out), fused_add_rmsnorm=fused_add_rmsnorm
)
_KINDS = {
    "kvcache": SimpleNamespace(store_cache=_store_cache),
    "activation": SimpleNamespace(run_activation=_activate),
    "rmsnorm": _NORM,
    "fused_add_rmsnorm": _NORM,
    "rotary_embedding": SimpleNamespace(rotary_embedding=_rotate),
    "clamp_position": SimpleNamespace(clamp_position=lambda out, lens: out.copy_((lens - 1).clamp(min=0))),
    "fused_rope": _FusedRope(),
}


def load(name: str, *args: object, **options: object) -> Any:
    """Do what ``load_jit`` does. Raises NoStandInError."""
    if name == "fused_rope":
        assert str(args[0]).partition(",")[0].strip().lower() in ("true", "1"), f"not as NeoX rotates: {args}"
    kind = _KINDS.get(name)
    note(f"compiled kernel {name} {args}: {'a stand-in' if kind else 'NONE'}")
    if kind is None:
        raise NoStandInError(f"the compiled kernel {name} has no stand-in")
    return kind
