"""Starts the data plane of this process's engine, and compiles the restore kernels."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import msgspec
import torch

from sgl_kvfetch import metrics
from sgl_kvfetch.codec import CellPlace, Quantiser
from sgl_kvfetch.engine import DataPlane, Peer
from sgl_kvfetch.engine.process import DataPlaneProcess, Launch, Setup
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.log import brief
from sgl_kvfetch.plugin import auto_profile, status
from sgl_kvfetch.plugin.auto_profile import AutoProfile
from sgl_kvfetch.plugin.device.pools import SlotPages
from sgl_kvfetch.plugin.host.pool import HostPages
from sgl_kvfetch.plugin.identity import (
    compile_hash_function,
    draft_model,
    engine_config,
    engine_heads,
    engine_quantiser,
    kv_cache_scale,
    profile_needs,
    profile_watch,
    quantiser_label,
    require_own_profile,
)
from sgl_kvfetch.protocol import KVFetchConfig, SharedPool, Start, Watch
from sgl_kvfetch.protocol.quantiser import written_places

if TYPE_CHECKING:
    from sgl_kvfetch.plugin.host.side_pools import SidePools

logger = logging.getLogger(__name__)

_launch: Launch = DataPlaneProcess
_SMALL_PAGE = 16  # tokens; SGLang's default on GPUs is 1


def open_engine_plane(
    config: KVFetchConfig,
    rank: Any,
    pages: HostPages | SlotPages,
    gpu: int | None,
    most_span_pages: int | None = None,
    sides: SidePools | None = None,
    *,
    staging_bytes: int = 0,
    takes_code: bool = False,
    pool: SharedPool | None = None,
) -> DataPlane:
    """Start the data plane of one rank for the model that SGLang has loaded, and wait until it serves. ``rank``: has
    ``tp_rank`` and ``tp_size``, and with ``sides`` also ``pp_rank`` and ``pp_size``. ``staging_bytes``: of the shared
    memory in which prompts are staged; 0 if none are. ``pool``: where fetched pages go, if any are. ``gpu``,
    ``takes_code``: as in `messages.Start`. Raises KVFetchError."""
    side_bytes = sides.page_bytes if sides else {}
    files = () if pool is None else pool.files
    setup = Setup(
        _launch, pages.geometry, side_bytes, config.write_queue_bytes, staging_bytes, config.memory_cache, files
    )
    launched = Peer(setup)  # now: it imports torch while we find out what it is to serve
    try:
        compile_hash_function()
        asked, why_no_klt = config, _why_no_klt(sides, rank, pages.geometry.dtype)
        needs = partial(profile_needs, asked, rank, pages.geometry, pages.first_layer)
        config = engine_config(asked, why_no_klt, needs, launched.take_profile)
        quantiser = engine_quantiser(config, rank, pages.geometry, pages.first_layer)
        heads = engine_heads(config, quantiser, rank, pages.geometry, pages.first_layer, _pools(config, rank, sides))
        _tell(config, quantiser, heads)
        watch = None
        if asked.quantiser == "auto" and not why_no_klt and config.quantiser_name == "exact":
            watch = profile_watch(needs())
        opening = Opening(heads, rank.tp_rank, pages, gpu, most_span_pages, side_bytes, takes_code, pool)
        start = opening.start(config, quantiser, watch if rank.tp_rank == 0 else None)
    except BaseException:
        launched.end()
        raise
    plane = DataPlane(start, launched)
    if rank.tp_rank == 0 and pages.geometry.page_size < _SMALL_PAGE:
        logger.warning(
            "kvfetch: pages of %d tokens make lookups slow and manifests large, and in host mode cells small: "
            "--page-size 64 is recommended",
            pages.geometry.page_size,
        )
    if watch is None:
        return plane
    # Device mode on a GPU has pages under way that its kernels have quantised.
    follow = None if _is_on_gpu(pages) else partial(_by_profile, asked, watch, rank, opening)
    is_on_cpu = not torch.accelerator.is_available()
    auto_profile.begin(AutoProfile(plane, rank.tp_rank, rank.tp_size, follow, pauses=is_on_cpu))
    return plane


def _why_no_klt(sides: SidePools | None, rank: Any, dtype: str) -> str:
    """Return why this engine cannot have ``klt``; "" if it can. ``dtype``: of its KV cache."""
    if dtype.startswith("float8") and not rank.is_mla_model and (scale := kv_cache_scale()):
        return (
            f"quantiser 'klt' does not support a KV cache in fp8 with scales ({scale}), since a profile is of K and V "
            "without them: use 'exact', or start SGLang with --kv-cache-dtype auto"
        )
    if sides and rank.pp_size > 1:  # SGLang does not say which of the model's layers a stage has
        return "quantiser 'klt' does not support models with side pools in pipeline stages: use 'exact' or 'uint8'"
    return ""


def _pools(config: KVFetchConfig, rank: Any, sides: SidePools | None) -> str:
    """Return what identifies the pages of side pools."""
    if not sides:
        return ""
    pools = sides.identity(rank.tp_rank, rank.tp_size, rank.is_mla_model, rank.pp_rank, rank.pp_size)
    return f"{pools},draft {draft_model(config)}" if sides.has_draft else pools


def _by_profile(config: KVFetchConfig, watch: Watch, rank: Any, opening: Opening, digest: str, launched: Peer) -> Start:
    """Take the profile with this digest from the store, as at an attachment. Return what starts a data plane that
    serves by it, and which is ``launched``. ``config``: as the user has it, with ``auto``. ``opening``: how the former
    one was opened. Raises KVFetchError."""
    taken = launched.take_profile(config, watch, digest)
    if taken is None:
        raise ConfigError(f"{config.store} has no usable profile {watch.weights}/{digest} any more: publish it again")
    if rank.tp_rank == 0:
        logger.info("kvfetch: %s", taken.about)
    config, heads, pages = config.with_profile(taken.path), opening.heads, opening.pages
    quantiser = engine_quantiser(config, rank, pages.geometry, pages.first_layer)
    namespace = replace(heads.namespace, quantiser=quantiser.identity)
    labels = msgspec.structs.replace(heads.labels, quantiser=quantiser_label(config, quantiser))
    heads = HeadSlice(namespace, heads.heads, labels)
    _tell(config, quantiser, heads)
    return replace(opening, heads=heads).start(config, quantiser)


def _tell(config: KVFetchConfig, quantiser: Quantiser, heads: HeadSlice) -> None:
    """Say what is served from now on. Raises ConfigError for a profile of other weights."""
    require_own_profile(config, quantiser, heads.namespace)
    logger.info("kvfetch: %s, namespace %s: %s", config.store, heads.folder, heads.namespace)
    status.serves(heads, config.coarseness(quantiser))


@dataclass(frozen=True)
class Opening:
    """What all that starts data planes of one rank has in common. ``rank``: in its group. ``pages``: where its pages
    go. Other fields as for `open_engine_plane`."""

    heads: HeadSlice
    rank: int
    pages: HostPages | SlotPages
    gpu: int | None
    most_span_pages: int | None
    side_bytes: Mapping[str, int]
    takes_code: bool
    pool: SharedPool | None

    def start(self, config: KVFetchConfig, quantiser: Quantiser, watch: Watch | None = None) -> Start:
        """Return what starts the data plane, and prepare this rank's GPU for it. Call on a thread whose GPU it is."""
        pages, heads = self.pages, self.heads
        takes_code = self.takes_code
        if _is_on_gpu(pages):
            places = written_places(config, heads, quantiser, self.most_span_pages)
            takes_code = takes_code and _are_prepared(pages, quantiser, places)
            if config.writes:
                pages.prepare_writes(quantiser, places)
        return Start(
            config.as_json(),
            heads.namespace,
            heads.heads.start,
            heads.heads.stop,
            self.rank,
            self.most_span_pages,
            dict(self.side_bytes),
            labels=heads.labels,
            watch=watch,
            takes_code=takes_code,
            gpu=self.gpu,
            pool=() if self.pool is None else self.pool.places,
        )


def _are_prepared(pages: SlotPages, quantiser: Quantiser, places: Sequence[CellPlace]) -> bool:
    """Prepare to restore cells on the GPU. Return whether it can: if not, prompts are staged as values."""
    try:
        pages.prepare(quantiser, places)
    except Exception as error:  # a compiler and a driver fail in many ways
        name = "exact" if quantiser.is_lossless else "klt"
        logger.warning("kvfetch: %s is decoded and restored on the CPU: %s", name, brief(error), exc_info=True)
        pages.release()
        metrics.LEFT_TO_CPU.labels("restore").set(1)
        return False
    metrics.LEFT_TO_CPU.labels("restore").set(0)
    return True


def _is_on_gpu(pages: HostPages | SlotPages) -> TypeGuard[SlotPages]:
    return isinstance(pages, SlotPages) and pages.device is not None
