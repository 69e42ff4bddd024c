"""Names the pages of LoRA adapters by what the adapters contain.

SGLang appends an adapter's id to the ``extra_key`` of its requests. The key separates their nodes in the radix tree,
and seeds their page hashes. But an id says nothing about the weights. For an adapter of ``--lora-paths`` it is derived
from name and path, which stay the same when the adapter is trained again. For one that is loaded at run time it is
random, so nobody finds its pages again. We put a digest of the adapter in the place of the id. The digest depends on
what SGLang has loaded, and on nothing else. So ranks and servers that load equal adapters agree, and an adapter that
changes has other pages.

The digest is taken when SGLang loads an adapter, on the scheduler's thread. SGLang's loading reads the same bytes, and
already blocks that thread for longer. All of this runs in the scheduler's process.
"""

from __future__ import annotations

import weakref
from typing import Any

import msgspec
import torch
import xxhash

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.plugin.register import BACKEND, is_chosen


class _State:
    """The state of this process. It is a class so that tests can have their own."""

    def __init__(self) -> None:
        self.manager: Any = None  # SGLang's, if pages of its adapters are named by content
        self.digests: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


_state = _State()


def watch_adapters(manager: Any, *args: Any, **kwargs: Any) -> None:
    """Before ``LoRAManager.init_state``, which loads the adapters of ``--lora-paths``: begin to name pages by content,
    unless another storage backend is chosen."""
    from sglang.srt.runtime_context import get_memory

    memory = get_memory()
    may_attach = memory.enable_hierarchical_cache and memory.hicache_storage_backend is None
    if may_attach or is_chosen(memory):
        _state.manager = manager


def record_adapter(adapter: Any) -> None:
    """Before ``LoRAAdapter._normalize_weights``, when all weights of an adapter are there as they came: digest them."""
    if _state.manager is not None:
        _state.digests[adapter] = digest_adapter(adapter)


def name_by_content(result: None, req: Any, *args: Any, **kwargs: Any) -> None:
    """After ``Req.__init__``: put the digest of the request's adapter in the place of its id, at the end of
    ``extra_key``."""
    if req.lora_id is None or _state.manager is None:
        return
    adapter = _state.manager.loras.get(req.lora_id)
    if adapter is not None:  # SGLang computes no request whose adapter it does not have
        name = _state.digests[adapter]
        if isinstance(adapter.config.target_modules, str):  # "all-linear": those that this server has buffers for
            name = xxhash.xxh3_128_hexdigest(",".join((name, *sorted(_state.manager.target_modules))).encode())
        req.extra_key = req.extra_key.removesuffix(req.lora_id) + name


def require_named_adapters() -> None:
    """Raise UnsupportedError if this engine has LoRA, and its pages are not named by content."""
    from sglang.srt.runtime_context import get_lora

    if get_lora().enable_lora and _state.manager is None:
        raise UnsupportedError(
            "LoRA adapters were loaded for another storage backend, so their contents are not known: start the server "
            f"with --hicache-storage-backend {BACKEND}"
        )


def digest_adapter(adapter: Any) -> str:
    """Return 32 hex digits over the weights and the config of a ``LoRAAdapter`` that SGLang has not normalised yet.

    `docs/format.md` defines it. The tensors may be on any device.
    """
    weights = {name: weight for layer in adapter.layers for name, weight in layer.weights.items()}
    weights |= adapter.embedding_layers | adapter.added_tokens_embeddings
    lines = [_line(name, weights[name]) for name in sorted(weights)]
    config = msgspec.json.encode(adapter.config.hf_config, order="sorted")
    return xxhash.xxh3_128_hexdigest("".join(lines).encode() + config)


def _line(name: str, weight: torch.Tensor) -> str:
    content = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    dtype = str(weight.dtype).removeprefix("torch.")
    return f"{name}\0{dtype}\0{','.join(map(str, weight.shape))}\0{xxhash.xxh3_128_hexdigest(content)}\n"
