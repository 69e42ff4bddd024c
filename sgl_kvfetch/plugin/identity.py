"""What this engine's pages are: the quantiser, the namespace, and SGLang's hashes, each of which identifies a page and
all pages before it.

The namespace is what keeps wrong values out of a KV cache: servers share pages if, and only if, theirs are equal. So
whatever changes K or V beyond rounding must be in it: the weights, by a digest of all files that make them; SGLang's
flags that change values; the page size, the heads, the quantiser with its profile. What does not change them must not
be in it, or servers that could share compute everything twice.

Both mistakes are possible, and only one is harmless. So a flag counts unless it is known not to matter: of SGLang's
group ``model``, all fields count but those in `IRRELEVANT`, and a field that a new release adds counts until somebody
has looked at it. tests/plugin/test_namespace.py goes through all of them. Where the files do not say what the weights
are (they come from elsewhere, or were updated while the server ran), nothing is guessed: the user must name them.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
import xxhash
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_kvfetch.codec import Quantiser, fingerprint_model
from sgl_kvfetch.codec.fingerprint import digest_file, digest_files, model_folder
from sgl_kvfetch.errors import ConfigError, KVFetchError, StoreError, UnsupportedError
from sgl_kvfetch.keys import HeadSlice, Labels, Namespace, label_of_flags, label_of_klt, label_of_model
from sgl_kvfetch.plugin.adapters import require_named_adapters
from sgl_kvfetch.plugin.weight_updates import require_known_weights
from sgl_kvfetch.protocol import KVFetchConfig, TakenProfile, Watch, config_quantiser
from sgl_kvfetch.protocol.messages import ProfileNeeds
from sgl_kvfetch.protocol.quantiser import rank_heads, require_profile
from sgl_kvfetch.types import KVGeometry

logger = logging.getLogger(__name__)


def compile_hash_function() -> None:
    """Compile SGLang's hash function, or load it. Call at start.

    Otherwise the first lookup compiles it, for seconds, and SGLang's scheduler dies if a flush finds a lookup that does
    not end within 10 s.
    """
    get_storage_hash_str(array("q", [0]), None, page_size=1)


# Load formats whose weights do not come from the model's files.
_ELSEWHERE = {
    "dummy": "has random weights",
    "remote": "takes the weights from elsewhere",
    "remote_instance": "takes the weights from another server",
}
# Flags that change the values of K and V, besides the weights.
# All fields of the group ``model`` count except these. So a field that another SGLang adds counts until it is known.
IRRELEVANT = frozenset(
    {
        # Parts of the namespace already.
        "model_path",
        "revision",
        "dtype",
        "quantization",
        # The location of the same files, how they are read, and what is checked, written or deleted on the way.
        "download_dir",
        "model_checksum",
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "delete_ckpt_after_loading",
        "startup_weight_load_mode",
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        # Weights from elsewhere than the model's files: `namespace.py` and `weight_updates.py` require a model_id.
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "engine_info_bootstrap_port",
        "modelexpress_config",
        "checkpoint_engine_wait_weights_before_ready",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
        # A flag of the draft model, which is in ``DRAFT``.
        "decrypted_draft_config_file",
    }
)
# Models that make their rotary embedding for ``--context-length``. With some kinds of scaling, K depends on that. Other
# models make it for the length in their config.
READ_CONTEXT_LENGTH = frozenset(
    {"Grok1ForCausalLM", "Grok1ModelForCausalLM", "MiMoV2ForCausalLM", "MiMoV2FlashForCausalLM"}
)
# Of the other groups, only these fields count. Kernels and parallelism change nothing but the rounding.
RELEVANT = (
    "exec.comm.enable_quant_communications",
    "exec.moe.enable_w4a4_mxfp4_megamoe",
    "exec.moe.flashinfer_mxfp4_moe_precision",
    "exec.moe.kt_weight_path",
    "exec.moe.kt_method",
    "exec.moe.kt_num_gpu_experts",
    "exec.moe.kt_max_deferred_experts_per_token",
    # Users of these flags want the last bit to be reproducible.
    "exec.deterministic.enable_deterministic_inference",
    "exec.deterministic.rl_on_policy_target",
    "observability.forward_hooks",
    "mm.mm_process_config",
    "mm.trust_mm_content_hashes",
)
# These fields count for a draft model's KV cache.
DRAFT = (
    "model.decrypted_draft_config_file",
    "spec.enable_multi_layer_eagle",
    "spec.speculative_algorithm",
    "spec.speculative_draft_kv_cache_dtype",
    "spec.speculative_draft_model_quantization",
    "spec.speculative_draft_sink_size",
    "spec.speculative_draft_window_size",
    "spec.speculative_enable_w4a4_mxfp4_megamoe",
)
# Paths: the content of the files counts, not their location.
FILES = frozenset(
    {
        "quantization_param_path",
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "modelopt_checkpoint_restore_path",
        "rl_quant_profile",
        "kt_weight_path",
    }
)
JSON_TEXTS = frozenset({"json_model_override_args", "model_loader_extra_config"})
# Values that do what the default does. What a KV cache without quantisation holds is in the namespace already.
LIKE_THE_DEFAULT = {
    "load_format": {"safetensors", "fastsafetensors", "instanttensor", "runai_streamer"},
    "model_impl": {"sglang"},
    "kv_cache_dtype": {"bf16", "bfloat16"},
}
# Keys of ``model_loader_extra_config`` that say how fast the weights are read.
LOADER_SPEED = frozenset({"enable_multithread_load", "num_threads", "concurrency", "memory_limit", "distributed"})


TakeProfile: TypeAlias = "Callable[[KVFetchConfig, Watch, str | None], TakenProfile | None]"
"""Takes a profile from the store: `engine.process.Peer.take_profile`."""


def engine_config(
    config: KVFetchConfig, why_no_klt: str, needs: Callable[[], ProfileNeeds], take: TakeProfile
) -> KVFetchConfig:
    """Return the config as this engine serves it: of ``auto`` as ``klt`` or ``exact``, and of ``klt`` with a profile:
    its own, or the newest that the store has for the loaded weights and that has what this rank ``needs``.
    ``why_no_klt``: why the engine cannot have ``klt``; "" if it can.

    Raises ConfigError if there is none, and UnsupportedError if the model's files do not say what the weights are.
    """
    if config.quantiser_name != "klt":
        return config
    if why_no_klt and config.quantiser != "auto":
        raise UnsupportedError(why_no_klt)
    if why_no_klt:
        logger.warning("kvfetch: %s; quantiser 'auto' stays 'exact' here", why_no_klt)
        return config.as_exact
    if config.profile is not None:
        return config
    if config.model_id is not None:
        raise ConfigError(
            "stores keep profiles by the fingerprint of the weights, which model_id replaces: set profile to a file, "
            "as kvfetch profile get writes it, or leave out model_id"
        )
    from sglang.srt.runtime_context import get_model

    return with_profile(config, profile_watch(needs()), get_model().model_path, tensor_parallel_group(), take)


def profile_watch(needs: ProfileNeeds) -> Watch:
    """Return what it takes to find a profile that fits. Raises UnsupportedError."""
    from sglang.srt.runtime_context import get_model

    model = get_model()
    folder = model_folder(model.model_path, model.revision)
    name = label_of_model(model.model_path, model.model_path)
    return Watch(_weights_digest(), str(folder), name, needs)


def engine_quantiser(config: KVFetchConfig, storage_config: Any, geometry: KVGeometry, first_layer: int) -> Quantiser:
    """Return the quantiser that the config names. Raises ConfigError for a profile of another model."""
    quantiser = config_quantiser(config)
    profile = quantiser.profile
    if profile is None:
        return quantiser
    assert config.profile is not None
    require_profile(profile_needs(config, storage_config, geometry, first_layer), config.profile, profile)
    if profile.rotations is None:
        logger.warning(
            "kvfetch: profile %s keeps RoPE in K, which makes files larger: see the calibration's notes", config.profile
        )
    return quantiser


def profile_needs(config: KVFetchConfig, rank: Any, geometry: KVGeometry, first_layer: int) -> ProfileNeeds:
    """Return what a profile must have for this rank. ``rank``: has ``tp_rank`` and ``tp_size``."""
    layers = pool_layers()
    end_layer = first_layer + geometry.num_layers
    mine = tuple(range(first_layer, end_layer)) if layers is None else layers[first_layer:end_layer]
    return ProfileNeeds(geometry, mine, first_layer, rank.tp_rank, rank.tp_size, config.target_kl)


def require_own_profile(config: KVFetchConfig, quantiser: Quantiser, namespace: Namespace) -> None:
    """Raise ConfigError for a profile that was calibrated for other weights. With ``model_id``, do not check."""
    profile = quantiser.profile
    if config.model_id is not None or profile is None:
        return
    calibrated = profile.calibration.weights
    if namespace.model != f"weights:{calibrated}":
        raise ConfigError(
            f"profile {config.profile} was calibrated for {profile.calibration.model!r} with weights "
            f"{calibrated}, but the engine has {namespace.model.removeprefix('weights:')}; calibrate a profile for "
            "these weights, or set model_id to use this one anyway"
        )


def pool_layers() -> tuple[int, ...] | None:
    """Return the model's layers that SGLang has in its pool of K and V. None if that has all layers."""
    from sglang.srt.runtime_context import process_model_config

    config = process_model_config()
    if config.full_attention_layer_ids is not None:  # the others' windows are in a pool of their own
        return tuple(config.full_attention_layer_ids)
    for each in (config.hf_text_config, config.hf_config):  # the others have states
        layers = getattr(each, "full_attention_layer_ids", None)
        if layers is not None:
            return tuple(layers)
    return None


def engine_heads(
    config: KVFetchConfig,
    quantiser: Quantiser,
    storage_config: Any,
    geometry: KVGeometry,
    first_layer: int,
    side_pools: str = "",
) -> HeadSlice:
    """Return the namespace and heads that distinguish this rank's KV cache from all others. ``side_pools``: what
    identifies the pages of the rank's side pools.

    Reads the weights of the model unless ``model_id`` is set. Raises UnsupportedError if nothing identifies the
    weights or LoRA adapters, or if ``model_id`` is the name of weights that the server had before.
    """
    require_known_weights(config.model_id)
    require_named_adapters()
    name = f"id:{config.model_id}" if config.model_id is not None else f"weights:{_weights_digest()}"
    num_heads = 1 if storage_config.is_mla_model else _model_heads(geometry.num_heads, storage_config.tp_size)
    namespace = Namespace(
        model=name,
        model_dtype=compute_flags(),
        attention=("mla" if storage_config.is_mla_model else "mha") + (side_pools and f" with {side_pools}"),
        kv_dtype=geometry.dtype,
        page_size=geometry.page_size,
        num_layers=geometry.num_layers,
        first_layer=first_layer,
        num_heads=num_heads,
        k_head_dim=geometry.k_head_dim,
        v_head_dim=geometry.v_head_dim,
        quantiser=quantiser.identity,
    )
    heads = rank_heads(storage_config.tp_rank, storage_config.tp_size, geometry.num_heads, num_heads)
    return HeadSlice(namespace, heads, _labels(config, quantiser))


_KV_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")


def kv_cache_scale() -> str:
    """Return by what SGLang divides K and V before it puts them into a KV cache in fp8; "" if by nothing. Reads the
    headers of the model's safetensors files, if it has any here."""
    from safetensors import safe_open
    from sglang.srt.runtime_context import get_model

    model = get_model()
    if model.quantization_param_path is not None:
        return f"--quantization-param-path {model.quantization_param_path}"
    try:
        folder = model_folder(model.model_path, model.revision)
    except UnsupportedError:  # weights from elsewhere
        return ""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in filter(lambda each: each.endswith(_KV_SCALES), file.keys()):
                scales = file.get_tensor(name).float()
                if bool(((scales > 0) & (scales != 1)).any()):
                    return f"{name} in {path.name}"
    return ""


def _labels(config: KVFetchConfig, quantiser: Quantiser) -> Labels:
    from sglang.srt.runtime_context import get_model, get_serving

    path = get_model().model_path
    model = label_of_model(get_serving().served_model_name or path, path)
    flags = label_of_flags(dict(_changed_flags(_counts)))
    return Labels(model, quantiser_label(config, quantiser), flags)


def quantiser_label(config: KVFetchConfig, quantiser: Quantiser) -> str:
    """Return what segments call the quantiser of a config; "" if its identity says it all."""
    if quantiser.profile is None:
        return ""
    return label_of_klt(config.target_kl or quantiser.profile.default_target_kl)


def _model_heads(rank_heads: int, tp_size: int) -> int:
    """Return the number of the model's KV heads."""
    if rank_heads > 1 or tp_size == 1:
        return rank_heads * tp_size
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import get_server_args

    # With more ranks than heads, several ranks have the same one.
    model_heads: int = ModelConfig.from_server_args(get_server_args()).get_total_num_kv_heads()
    return min(tp_size, model_heads)


def _weights_digest() -> str:
    """Return the fingerprint of the loaded weights. Raises UnsupportedError if the model's files do not give it."""
    from sglang.srt.runtime_context import get_model

    model = get_model()
    _require_own_files("--load-format", model.load_format)
    if model.weight_cache_mode == "client":
        raise UnsupportedError(
            "--weight-cache-mode client takes the weights from a daemon; set model_id in the kvfetch config"
        )
    return fingerprint_model(model.model_path, model.revision)


def draft_model(config: KVFetchConfig) -> str:
    """Return what identifies the draft model and how it computes its KV cache.

    Reads its weights unless ``model_id`` is set, which names them, too. Raises UnsupportedError if nothing identifies
    them.
    """
    from sglang.srt.runtime_context import get_model, get_spec

    model, draft = get_model(), get_spec()
    if config.model_id is not None:
        return draft_flags()
    _require_own_files("--speculative-draft-load-format", draft.speculative_draft_load_format or model.load_format)
    if draft.speculative_draft_model_path is None:  # its layers are among the model's weights
        return draft_flags()
    weights = fingerprint_model(draft.speculative_draft_model_path, draft.speculative_draft_model_revision)
    return f"weights:{weights};{draft_flags()}"


def _require_own_files(flag: str, load_format: str) -> None:
    if load_format in _ELSEWHERE:
        raise UnsupportedError(f"{flag} {load_format} {_ELSEWHERE[load_format]}; set model_id in the kvfetch config")


def compute_flags() -> str:
    """Return ``dtype=...;quantization=...``, with a digest of the flags that differ from SGLang's defaults, if any.

    Call this where SGLang's resolved config is published. It reads the files that flags name.
    """
    from sglang.srt.runtime_context import get_model

    model = get_model()
    text = f"dtype={model.dtype};quantization={model.quantization}"
    digest = _digest(_counts)
    return f"{text};{digest}" if digest else text


def draft_flags() -> str:
    """Return a digest of the flags that change a draft model's KV cache and differ from SGLang's defaults, if any.

    Call this where SGLang's resolved config is published. It reads the files that flags name.
    """
    return _digest(lambda group, name: f"{group}.{name}" in DRAFT)


def _counts(group: str, name: str) -> bool:
    return name not in IRRELEVANT if group == "model" else f"{group}.{name}" in RELEVANT


def _digest(counts: Callable[[str, str], bool]) -> str:
    changed = dict(_changed_flags(counts))
    if not changed:
        return ""
    logger.info("kvfetch: flags that are part of the namespace: %s", ", ".join(sorted(changed)))
    return f"flags={xxhash.xxh3_64_hexdigest(msgspec.json.encode(changed, order='sorted'))}"


def _changed_flags(counts: Callable[[str, str], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the name and JSON value of each flag that counts and differs from SGLang's default."""
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.server_args import ServerArgs

    groups = namespace_of(ServerArgs)
    for field in msgspec.structs.fields(ServerArgs):
        group = groups[field.name]
        if not counts(group, field.name):
            continue
        default = field.default_factory() if callable(field.default_factory) else field.default
        found = _resolved(group, field.name)
        if isinstance(found, str) and found in LIKE_THE_DEFAULT.get(field.name, ()):
            continue
        value = _comparable(field.name, found)
        if value != _comparable(field.name, default) and _matters(field.name):
            yield field.name, value


def _matters(name: str) -> bool:
    """Return whether this flag, which is not at its default, changes K or V of the engine's model."""
    if name == "context_length":
        return _reads_context_length()
    return name != "trust_remote_code" or not _is_sglangs_own()


def _reads_context_length() -> bool:
    """Return whether K may depend on ``--context-length``: in the models of ``READ_CONTEXT_LENGTH``, and in a draft
    model, whose own length SGLang may set to it."""
    from sglang.srt.runtime_context import get_spec, process_model_config

    architectures = process_model_config().hf_config.architectures or ()
    return get_spec().speculative_draft_model_path is not None or not READ_CONTEXT_LENGTH.isdisjoint(architectures)


def _is_sglangs_own() -> bool:
    """Return whether SGLang has code of its own for the model. Otherwise Transformers computes it, and
    ``--trust-remote-code`` decides with which code."""
    from sglang.srt.configs.model_config import ModelImpl
    from sglang.srt.model_loader.utils import get_resolved_model_impl
    from sglang.srt.runtime_context import process_model_config

    return bool(get_resolved_model_impl(process_model_config()) == ModelImpl.SGLANG)


def _resolved(group: str, name: str) -> Any:
    from sglang.srt.runtime_context import get_context

    top, *subgroups = group.split(".")
    bag = get_context().config_bag(top)
    for subgroup in subgroups:
        bag = getattr(bag, subgroup)
    return getattr(bag, name)


def _comparable(name: str, value: Any) -> Any:
    """Convert a flag's value so that values of equal meaning become equal. Values of unknown types become text."""
    if name in FILES and value is not None:
        return _path_digest(Path(value))
    if name in JSON_TEXTS:
        try:
            parsed = json.loads(value or "{}")
        except ValueError:
            return value
        if name == "model_loader_extra_config" and isinstance(parsed, dict):
            return {key: each for key, each in parsed.items() if key not in LOADER_SPEED}
        return parsed
    if value in ("", [], {}):  # SGLang resolves some unset flags to one of these
        return None
    return msgspec.to_builtins(value, enc_hook=repr)


def _path_digest(path: Path) -> str:
    """Return a digest of a file, or of all files below a folder and their names. Without a file, return the path."""
    if path.is_file():
        return digest_file(path)
    files = sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else []
    return digest_files(path, files) if files else str(path)


class _Result(msgspec.Struct, frozen=True):
    """What one rank found: a profile, or that there is none, or why it cannot be had (``error``), or why the store
    cannot be asked (``outage``)."""

    taken: TakenProfile | None = None
    error: str = ""
    outage: str = ""


class Alone:
    """Stands for SGLang's group of ranks where there is one rank."""

    rank_in_group = 0

    def all_gather_object(self, mine: _Result) -> list[_Result]:
        return [mine]


def tensor_parallel_group() -> Any:
    if not torch.distributed.is_initialized():
        return Alone()
    from sglang.srt.distributed.parallel_state import get_tp_group

    return get_tp_group()


def with_profile(config: KVFetchConfig, watch: Watch, model: str, group: Any, take: TakeProfile) -> KVFetchConfig:
    """Return the config of ``klt`` with the path of the store's newest profile that has what ``watch`` needs. Asks the
    store, and waits. ``model``: its path, for messages.

    If the store cannot be asked, and this machine has no copy of a profile, SGLang starts all the same: the config
    that is returned is that of ``exact``. With ``auto`` it also is if the store has none. All ranks of ``group`` call
    this. They take the profile that the first one has chosen, or all take ``exact``, or all raise ConfigError. Stages
    of a pipeline choose for themselves: none reads what another has written.
    """
    rank = group.rank_in_group
    first = group.all_gather_object(_result(take, config, watch) if rank == 0 else None)[0]
    if first == _Result() and config.quantiser == "auto":
        return config.as_exact
    if first == _Result():
        raise ConfigError(
            f"quantiser = 'klt' needs a profile, and {config.store} has none that can be used for the weights "
            f"{watch.weights} (the log names those that were passed over): type kvfetch calibrate --model {model} "
            f"--text FILE --publish {config.store}, or set quantiser to 'exact'"
        )
    mine = first
    if rank != 0 and first.taken is not None:
        mine = _result(take, config, watch, first.taken.digest)
    results = group.all_gather_object(mine)
    for number, result in enumerate(results):
        if result.error or result == _Result():
            raise ConfigError(result.error or f"rank {number} did not find the profile that rank 0 took: start again")
    if outages := [result.outage for result in results if result.outage]:
        logger.warning(
            "kvfetch: no profile for klt: %s cannot be asked (%s), and this machine has no copy; this server stores "
            "with 'exact' until it %s",
            config.store,
            outages[0],
            "has one" if config.quantiser == "auto" else "starts again",
        )
        return config.as_exact
    assert mine.taken is not None
    if rank == 0:
        logger.info("kvfetch: %s", mine.taken.about)
    return config.with_profile(mine.taken.path)


def _result(take: TakeProfile, config: KVFetchConfig, watch: Watch, digest: str | None = None) -> _Result:
    try:
        return _Result(take(config, watch, digest))
    except StoreError as e:
        return _Result(outage=str(e))
    except KVFetchError as e:
        return _Result(error=str(e))
