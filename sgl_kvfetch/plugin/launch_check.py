"""The start-up check: a launch that selects our backend and cannot work stops before a model is loaded."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

from sgl_kvfetch.codec import read_outline, why_no_gpu
from sgl_kvfetch.codec.cuda_streams import GPU_ENV
from sgl_kvfetch.errors import ConfigError, SeamError, UnsupportedError
from sgl_kvfetch.plugin.register import BACKEND, LINKER_MODULE
from sgl_kvfetch.plugin.seams import check_seams
from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS, WITH_LINKER, installed_version
from sgl_kvfetch.protocol import KVFetchConfig, parse_config
from sgl_kvfetch.timeline import check_tracing

logger = logging.getLogger(__name__)

_FLAG = f"--hicache-storage-backend {BACKEND}"
_DEVICE_MODE = f"{_FLAG} without --enable-hierarchical-cache (device mode)"
PAGE_SIZE = 64  # tokens, where the user does not choose; the kernels and backends of attention all take it


def check_launch(server_args: Any) -> None:
    """Check SGLang, the flags and our config, where the flags select our backend.

    Raises ``SeamError`` if SGLang is not the expected one, ``UnsupportedError`` for flags that are not supported, and
    ``ConfigError`` for an invalid extra config, a file in it that cannot be read, a profile without the target, or a
    variable in the environment that is gone.
    """
    if mismatches := check_seams():
        raise SeamError("; ".join(mismatches))
    if (version := installed_version()) not in SGLANG_VERSIONS:
        logger.warning("kvfetch was not tested with sglang %s", version)
    _check_flags(server_args)
    _check_environment(is_device_mode=not server_args.enable_hierarchical_cache)
    extra, _ = read_extra_config(server_args.hicache_storage_backend_extra_config)
    config = parse_config(extra)
    _check_access(config)
    if config.profile is not None:
        # Load no tensors: SGLang forks after this, and whatever makes torch start threads here hangs in the children.
        read_outline(Path(config.profile)).require_target(config.target_kl)


def _check_access(config: KVFetchConfig) -> None:
    """Check the files and the keys that a config names for its store, its token, and its store's URL: in a process,
    half a second long, since SGLang's needs nothing of what that imports. Raises ConfigError."""
    command = [sys.executable, "-P", "-m", "sgl_kvfetch.plane.access"]  # -P: as for `DataPlaneProcess`
    checked = subprocess.run(
        command, input=json.dumps(config.as_json()), stderr=subprocess.PIPE, text=True, check=False
    )
    if checked.returncode:
        raise ConfigError(checked.stderr.strip() or f"{command} ended with exit code {checked.returncode}")
    sys.stderr.write(checked.stderr)  # warnings


def use_linker(server_args: Any) -> None:
    """Translate our flags without a host tier into those of SGLang's linker."""
    if server_args.enable_hierarchical_cache:
        return
    server_args.enable_unified_cache_external_linker = True
    server_args.unified_cache_external_linker_backend = "dynamic"
    server_args.unified_cache_external_linker_config = {
        "linker": "KVFetchLinker",
        "linker_module_path": LINKER_MODULE,
        "linker_extra_config": {"config": server_args.hicache_storage_backend_extra_config},
    }
    server_args.hicache_storage_backend = None


def larger_pages(chosen: dict[str, Any], server_args: Any) -> dict[str, Any]:
    """Return SGLang's choice of a page size, or larger pages where it is one token, its default.

    SGLang and we do something for each page on the scheduler's thread. With pages of one token, that doubles what a
    fetch costs there (docs/gpus.md).
    """
    if chosen != {"page_size": 1}:
        return chosen
    needs_one = {
        "--speculative-eagle-topk": (server_args.speculative_eagle_topk or 1) > 1,
        "this model's states": bool(server_args.uses_mamba_radix_cache),
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),  # both sides need one size
        "--chunked-prefill-size": (server_args.chunked_prefill_size or 0) > 0
        and server_args.chunked_prefill_size % PAGE_SIZE > 0,
    }
    if reasons := [reason for reason, is_given in needs_one.items() if is_given]:
        logger.info("kvfetch: pages have one token, because of %s", " and ".join(reasons))
        return chosen
    logger.info("kvfetch: pages have %d tokens, since no --page-size is given", PAGE_SIZE)
    return {"page_size": PAGE_SIZE}


def _check_flags(server_args: Any) -> None:
    """Raises UnsupportedError for SGLang's flags that do not work with ours, and says what to use."""
    if server_args.disaggregation_decode_enable_offload_kvcache:
        raise UnsupportedError(
            f"{_FLAG} does not work with --disaggregation-decode-enable-offload-kvcache: it writes pages without "
            "saying where they belong"
        )
    if server_args.dllm_algorithm is not None:
        raise UnsupportedError(
            f"{_FLAG} does not work with --dllm-algorithm: SGLang has no host tier and no linker for diffusion models"
        )
    if not server_args.enable_hierarchical_cache:
        _check_device_mode(server_args)
        check_tracing()
        return
    if server_args.hicache_mem_layout == "page_first_kv_split":
        raise UnsupportedError(
            f"{_FLAG} does not support --hicache-mem-layout page_first_kv_split: use page_first_direct, page_first, "
            "page_head or layer_first"
        )
    if server_args.hicache_host_memory_mode == "buffer_only" and server_args.pp_size > 1:
        raise UnsupportedError(
            f"{_FLAG} does not work with --hicache-host-memory-mode buffer_only and --pp-size {server_args.pp_size}: "
            "use the mode cache, or --pp-size 1"
        )


def _check_device_mode(server_args: Any) -> None:
    """Refuse an SGLang that accepts no linker from outside, and flags that need another radix cache or pool."""
    if not hasattr(server_args, "unified_cache_external_linker_config"):
        raise UnsupportedError(
            f"{_DEVICE_MODE} needs sglang {' or '.join(WITH_LINKER)}, found {installed_version()}: "
            "add --enable-hierarchical-cache"
        )
    refused = {
        "--disable-radix-cache": server_args.disable_radix_cache,
        "--radix-cache-backend": server_args.radix_cache_backend,
        "--enable-lmcache": server_args.enable_lmcache,
        "--enable-flexkv": server_args.enable_flexkv,
        "--enable-unified-cache-external-linker": server_args.enable_unified_cache_external_linker,
        "--enable-streaming-session": server_args.enable_streaming_session,
        "--disaggregation-mode": server_args.disaggregation_mode not in (None, "null"),
        "--pp-size": server_args.pp_size > 1,
        "--enable-pdmux": server_args.enable_pdmux,  # forward passes on further streams
        "--attn-dp-size": server_args.enable_dp_attention or server_args.attn_dp_size > 1,
        "--attention-context-parallel-size": server_args.attn_cp_size > 1,
        "--decode-context-parallel-size": server_args.dcp_size > 1,
    }
    for flag, is_given in refused.items():
        if is_given:
            raise UnsupportedError(
                f"{_DEVICE_MODE} does not work with {flag}: leave it out, or add --enable-hierarchical-cache"
            )


def _check_environment(*, is_device_mode: bool) -> None:
    """Refuse or warn of switches of SGLang's that need a GPU, and have not been tried."""
    from sglang.srt.environ import envs

    if envs.SGLANG_VIT_ENABLE_CUDA_GRAPH.get():
        # CUDA's global mode of capture, in which a thread that asks about an event breaks the capture of another.
        why = "SGLANG_VIT_ENABLE_CUDA_GRAPH: SGLang captures graphs while it serves, and our threads would break that"
        if is_device_mode:
            raise UnsupportedError(
                f"{_DEVICE_MODE} does not work with {why}; unset it, or add --enable-hierarchical-cache"
            )
        if not why_no_gpu():
            logger.warning("kvfetch: %s; set %s=0, or unset it", why, GPU_ENV)
    if is_device_mode and envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get():
        logger.warning(
            "kvfetch: SGLANG_ENABLE_POST_CAPTURE_KV_SIZING gives the KV pool memory that device mode needs for tables "
            "and buffers, 0.5 to 1 GB for an 8B model: unset it, or lower --mem-fraction-static"
        )


def read_extra_config(text: str | None) -> tuple[dict[str, Any], int]:
    """Parse ``--hicache-storage-backend-extra-config`` as SGLang does. Return it without SGLang's own keys, and one of
    these: the smallest number of tokens that is worth a lookup. Raises ConfigError."""
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    try:
        extra, threshold_tokens, *_ = HybridCacheController.parse_storage_backend_extra_config(text)
    except Exception as error:  # whatever the JSON, TOML and YAML readers and the file system raise
        raise ConfigError(
            f"--hicache-storage-backend-extra-config {text!r} cannot be read ({error}): "
            "expected a JSON object, or @ and the path of a JSON, TOML or YAML file"
        ) from error
    if not isinstance(extra, dict):
        raise ConfigError(f"--hicache-storage-backend-extra-config {text!r} is not a JSON object")
    return extra, threshold_tokens
