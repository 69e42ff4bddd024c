"""The profile that all ranks of an engine take from the store."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import torch

from sgl_kvfetch.errors import ConfigError, KVFetchError, StoreError
from sgl_kvfetch.plane import KVFetchConfig, TakenProfile, take_profile

logger = logging.getLogger(__name__)


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


def with_profile(config: KVFetchConfig, weights: str, model: str, group: Any) -> KVFetchConfig:
    """Return the config of ``klt`` with the path of the store's newest profile for an engine's weights. Asks the
    store, and waits. ``model``: its path, for messages.

    If the store cannot be asked, and this machine has no copy of a profile, SGLang starts all the same: the config
    that is returned is that of ``exact``. With ``auto`` it also is if the store has none. All ranks of ``group`` call
    this. They take the profile that the first one has chosen, or all take ``exact``, or all raise ConfigError. Stages
    of a pipeline choose for themselves: none reads what another has written.
    """
    rank = group.rank_in_group
    first = group.all_gather_object(_take(config, weights) if rank == 0 else None)[0]
    if first == _Result() and config.quantiser == "auto":
        return config.as_exact
    if first == _Result():
        raise ConfigError(
            f"quantiser = 'klt' needs a profile, and {config.store} has none that can be used for the weights "
            f"{weights}: type kvfetch calibrate --model {model} --text FILE --publish {config.store}, or set quantiser "
            "to 'exact'"
        )
    mine = first
    if rank != 0 and first.taken is not None:
        mine = _take(config, weights, first.taken.digest)
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


def _take(config: KVFetchConfig, weights: str, digest: str | None = None) -> _Result:
    try:
        return _Result(take_profile(config, weights, digest))
    except StoreError as e:
        return _Result(outage=str(e))
    except KVFetchError as e:
        return _Result(error=str(e))
