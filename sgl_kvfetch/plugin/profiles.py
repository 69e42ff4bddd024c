"""The profile that all ranks of an engine take from the store."""

from __future__ import annotations

import logging
from typing import TypeVar

import msgspec
import torch

from sgl_kvfetch.errors import ConfigError, KVFetchError
from sgl_kvfetch.plane import KVFetchConfig, TakenProfile, take_profile

logger = logging.getLogger(__name__)
T = TypeVar("T")


class _Result(msgspec.Struct, frozen=True):
    """What one rank found: ``taken`` is None if the store has no profile, or if there is an ``error``."""

    taken: TakenProfile | None = None
    error: str = ""


def with_profile(config: KVFetchConfig, weights: str, model: str) -> KVFetchConfig:
    """Return the config of ``klt`` with the path of the profile for an engine's weights: the config's own, or else the
    newest of the store. Asks the store, and waits. ``model``: its path, for messages.

    All ranks of a tensor-parallel group take the profile that the first one has chosen, or raise ConfigError together.
    Stages of a pipeline choose for themselves: each reads only what it has written.
    """
    if config.profile is not None:
        return config
    rank, first = _rank(), _Result()
    if rank == 0:
        first = _take(config, weights)
    first = _of_all_ranks(first)[0]
    mine = first
    if rank != 0 and first.taken is not None:
        mine = _take(config, weights, first.taken.digest)
    if first.taken is None and not first.error:
        raise ConfigError(
            f"quantiser = 'klt' needs a profile, and {config.store} has none that can be used for {model}, weights "
            f"{weights}: run kvfetch calibrate --model {model} --text FILE --publish {config.store}, or set quantiser "
            "to 'exact'"
        )
    for number, result in enumerate(_of_all_ranks(mine)):
        if result.taken is None:
            raise ConfigError(result.error or f"rank {number} did not find the profile that rank 0 took")
    assert mine.taken is not None
    if rank == 0:
        logger.info("kvfetch: %s", mine.taken.about)
    return config.model_copy(update={"profile": mine.taken.path})


def _take(config: KVFetchConfig, weights: str, digest: str | None = None) -> _Result:
    try:
        return _Result(take_profile(config, weights, digest))
    except KVFetchError as e:
        return _Result(error=str(e))


def _rank() -> int:
    return torch.distributed.get_rank(_group()) if torch.distributed.is_initialized() else 0


def _of_all_ranks(mine: T) -> list[T]:
    """Return what each rank has, in the order of ranks."""
    if not torch.distributed.is_initialized():
        return [mine]
    found: list[T] = [mine] * torch.distributed.get_world_size(_group())
    torch.distributed.all_gather_object(found, mine, group=_group())
    return found


def _group() -> torch.distributed.ProcessGroup:
    from sglang.srt.runtime_context import get_parallel

    group: torch.distributed.ProcessGroup = get_parallel().tp_group.cpu_group
    return group
