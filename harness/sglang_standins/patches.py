"""What is changed in SGLang 0.5.23 after its modules are imported: a function of the module for each.

No `torch` is imported here: each process of Python loads this.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from types import SimpleNamespace
from typing import Any

from .finder import Patch, note


def _load_jit(module: Any) -> None:
    """Instead of compiling CUDA."""
    from . import kernels

    module.load_jit = kernels.load


def _make_weights(module: Any) -> None:
    """``--load-format dummy`` gives weights of 1e-3, norms too, and so K and V of nearly zero. Give what a model has
    instead: norms of one, and matrices that keep the size of what they multiply. They are equal in every process."""
    import torch

    def initialize_dummy_weights(model: Any, *args: object, **kwargs: object) -> None:
        for number, (name, x) in enumerate(sorted(model.state_dict().items())):
            if not torch.is_floating_point(x) or "cos_sin" in name:
                continue
            if x.dim() < 2:
                x.data.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                generator = torch.Generator(device=x.device).manual_seed(1234 + number)
                std = 1.0 if "embed_tokens" in name else 1.0 / math.sqrt(x.shape[-1])
                x.data.normal_(0.0, std, generator=generator)
        note("random weights made")

    module.initialize_dummy_weights = initialize_dummy_weights


def _use_no_dual_gemm(module: Any) -> None:
    """It imports cutlass, for kernels of compute capability 10 alone."""
    module.DualGemm._select_mode = lambda self, *args: None


def _hash_in_python(module: Any) -> None:
    """SGLang compiles its page hash with g++ and OpenSSL's headers."""

    def get_hash(
        raw: Any, logical_len: int, unit_width: int, is_bigram: bool, prior: bytes | None, page_size: int | None = None
    ) -> str | list[str]:
        if is_bigram:
            raise RuntimeError("hashes of bigrams have no stand-in")
        words = array("I", raw[: logical_len * unit_width]).tobytes()
        if page_size is None:
            return hashlib.sha256((prior or b"") + words).hexdigest()
        digest, hashes, size = prior or b"", [], 4 * page_size * unit_width
        for start in range(0, len(words), size):
            digest = hashlib.sha256(digest + words[start : start + size]).digest()
            hashes.append(digest.hex())
        return hashes

    module._load_native_hash_module = lambda: SimpleNamespace(get_hash=get_hash)


def _fall_back_to_torch(module: Any) -> None:
    """Where an operator's compiled kernel has no stand-in, its PyTorch form serves from then on."""
    from .kernels import NoStandInError

    resolve = module.BaseFusedOp._resolve_forward_method

    def resolve_guarded(self: Any) -> Any:
        method = resolve(self)
        if getattr(method, "__name__", "") == "forward_native":
            return method

        def guarded(*args: object, **kwargs: object) -> Any:
            try:
                return method(*args, **kwargs)
            except NoStandInError as error:
                note(f"{type(self).__name__} runs in PyTorch: {error}")
                self._forward_method = self.forward_native
                return self.forward_native(*args, **kwargs)

        return guarded

    module.BaseFusedOp._resolve_forward_method = resolve_guarded


PATCHES: dict[str, Patch] = {
    "sglang.kernels.jit.utils.compile.loader": _load_jit,
    "sglang.srt.model_loader.weight_utils": _make_weights,
    "sglang.srt.layers.dual_gemm": _use_no_dual_gemm,
    "sglang.srt.mem_cache.cpp_utils.native_hash": _hash_in_python,
    "sglang.kernels.fused_op": _fall_back_to_torch,
}
