"""The quantiser that a config names, what a profile must have to be its, and the cells that its server writes.

Both ends need these: the engine to name what it has in its namespace, and to quantise and restore cells on its GPU, the
data plane to read and write segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from pathlib import Path
from typing import cast

from sgl_kvfetch.codec import (
    CellPlace,
    KltQuantiser,
    Profile,
    Quantiser,
    load_profile,
    quantiser_from_identity,
    read_outline,
)
from sgl_kvfetch.codec.quant import PlainQuantiserName
from sgl_kvfetch.codec.quant.klt import require_grid
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.protocol.config import CACHEGEN, KVFetchConfig
from sgl_kvfetch.protocol.messages import ProfileNeeds
from sgl_kvfetch.types import TENSORS, CellGrid

SPAN_TOKENS = 1024  # partial reads are rounded up to it
_MOST_NUMBERS = 8  # of layers in a message


def config_quantiser(config: KVFetchConfig) -> Quantiser:
    """Create the quantiser of a config. Raises ConfigError for a profile that is unreadable or misses the target."""
    name = config.quantiser_name
    if name.startswith(CACHEGEN):
        return quantiser_from_identity(name)
    if name != "klt":
        return make_quantiser(cast("PlainQuantiserName", name))
    assert config.profile is not None
    return KltQuantiser(load_profile(Path(config.profile)), config.target_kl)


# A profile


def require_profile_file(needs: ProfileNeeds, path: str) -> None:
    """Raise ConfigError unless the profile in a file has what is needed. Reads no tensors."""
    require_profile(needs, path, read_outline(Path(path)))


def require_profile(needs: ProfileNeeds, path: str, profile: Profile) -> None:
    """Raise ConfigError unless a profile, or its outline, has a rank's layers and heads as whole cells, and reaches the
    target. ``path``: for messages."""
    geometry, end_layer = needs.geometry, needs.first_layer + len(needs.layers)
    expected = {
        "KV heads per rank": (max(1, profile.grid.num_heads // needs.tp_size), geometry.num_heads),
        **{f"values a head of {t.upper()}": (profile.head_dim(t), geometry.head_dim(t)) for t in TENSORS},
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise ConfigError(f"profile {path} is for another model: it has {found} {what}, the engine has {wanted}")
    if profile.grid.num_layers < end_layer:
        raise ConfigError(
            f"profile {path} is for another model: it has {profile.grid.num_layers} layers, the engine has "
            f"{end_layer} or more"
        )
    layers = profile.layers.coded[needs.first_layer : end_layer]
    if layers != needs.layers:
        raise ConfigError(
            f"profile {path} is for other layers: it has the model's layers {_numbers(layers)}, and SGLang keeps "
            f"K and V of layers {_numbers(needs.layers)} in this pool; calibrate again"
        )
    heads = rank_heads(needs.tp_rank, needs.tp_size, geometry.num_heads, profile.grid.num_heads)
    require_grid(profile, needs.first_layer, len(needs.layers), heads.start, len(heads))
    profile.require_target(needs.target_kl)


def rank_heads(tp_rank: int, tp_size: int, num_heads: int, total: int) -> range:
    """Return the range of a rank's ``num_heads`` heads among the model's ``total`` heads."""
    # With more ranks than heads, neighbouring ranks have the same head.
    first = tp_rank * total // tp_size
    return range(first, first + num_heads)


def _numbers(numbers: Sequence[int]) -> str:
    """Return how a message lists layers: some of the first, and how many more."""
    more = f" and {len(numbers) - _MOST_NUMBERS} more" if len(numbers) > _MOST_NUMBERS else ""
    return ", ".join(map(str, numbers[:_MOST_NUMBERS])) + more


# Cells


def power_of_two_pages(tokens: int, page_size: int) -> int:
    """Return the largest power of two of pages that fits into ``tokens``, at least 1."""
    return 1 << (max(1, tokens // page_size).bit_length() - 1)


def span_pages(heads: HeadSlice, max_span_pages: int | None = None) -> int:
    """Return the pages of a span that a server writes. ``max_span_pages``: their upper limit."""
    most = power_of_two_pages(SPAN_TOKENS, heads.namespace.page_size)
    return min(most, max_span_pages or most)


def cell_heads(heads: HeadSlice, max_tp_size: int) -> int:
    """Return how many of a rank's heads a cell has, if the quantiser leaves that open: those of one rank of the largest
    TP size that shall read it."""
    total = heads.namespace.num_heads
    ranks = max(size for size in range(1, max_tp_size + 1) if total % size == 0)
    return gcd(len(heads.heads), total // ranks)


def written_places(
    config: KVFetchConfig, heads: HeadSlice, quantiser: Quantiser, max_span_pages: int | None = None
) -> list[CellPlace]:
    """Return the places of the cells of a prompt's first span, in storage order, as a config's server writes it.
    ``max_span_pages``: as for `span_pages`."""
    in_a_cell = quantiser.heads_of_a_cell(len(heads.heads), cell_heads(heads, config.max_tp_size))
    tokens = range(span_pages(heads, max_span_pages) * heads.namespace.page_size)
    return [place for _, _, place in cell_places(quantiser, heads, tokens, in_a_cell)]


def cell_places(
    quantiser: Quantiser, rank: HeadSlice, tokens: range, num_heads: int | None = None
) -> list[tuple[range, range, CellPlace]]:
    """Return the rank's layers and heads of each cell, and its place in the model, for some tokens of the sequence.
    ``num_heads``: of a cell, if not as many as the quantiser wants."""
    namespace, num_heads = rank.namespace, num_heads or quantiser.cell_heads or len(rank.heads)
    grid = CellGrid(namespace.num_layers, len(rank.heads), quantiser.cell_layers, num_heads)
    found = []
    for group, block in grid.cells():
        layers, heads = grid.layers(group), grid.heads(block)
        place = CellPlace(_from(namespace.first_layer, layers), _from(rank.heads.start, heads), tokens)
        found.append((layers, heads, place))
    return found


def _from(first: int, numbers: range) -> range:
    return range(first + numbers.start, first + numbers.stop)
