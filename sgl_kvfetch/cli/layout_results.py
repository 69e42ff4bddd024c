"""What a layout search found: as a table, as JSON, as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from sgl_kvfetch.cli.tables import make_table
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.search import Found, Measured
from sgl_kvfetch.types import TensorName

# Okabe and Ito's colours, which the colour-blind can tell apart.
_WINNER, _OTHER, _REFERENCE = "#0072B2", "#999999", "#D55E00"


def layouts_table(tensor: TensorName, found: Found, span_tokens: int) -> Table:
    """The finalists, the smallest first."""
    table = make_table((f"layout of {tensor.upper()}", ""), ("picture", "frames", "sample", "bits/value", "more"))
    best = found.winner
    for m in found.finalists:
        table.add_row(
            str(m.candidate),
            _remark(m, best),
            f"{m.layout.width}x{m.layout.height}",
            str(m.layout.num_frames(span_tokens)),
            f"{m.sample_bits:.4f}",
            f"{m.bits:.4f}",
            f"{_excess(m, best):+.1%}",
        )
    return table


def summary(tensor: TensorName, found: Found) -> str:
    """How the winner compares with what is used unless a profile says otherwise."""
    against = ", ".join(f"{_excess(m, found.winner):+.1%} {m.name}" for m in found.finalists if m.name)
    num_layouts = len(found.finalists) + len(found.others)
    return f"{tensor.upper()}: {found.winner.candidate}; {num_layouts} measured; others against it: {against}"


def layouts_json(about: Mapping[str, Any], found: Mapping[TensorName, Found]) -> dict[str, Any]:
    """``bits_per_value`` counts the bitstreams alone, over all cells; it is null for what did not get past the
    sample."""
    return {
        **about,
        "tensors": {
            tensor: {
                "winner": msgspec.to_builtins(result.winner.candidate.tiling),
                "candidates": [_as_json(m) for m in (*result.finalists, *result.others)],
            }
            for tensor, result in found.items()
        },
    }


def _as_json(m: Measured) -> dict[str, Any]:
    return {
        "name": m.name,
        "tiling": msgspec.to_builtins(m.candidate.tiling),
        "order": m.candidate.order,
        "layout": msgspec.to_builtins(m.layout),
        "sample_bits_per_value": m.sample_bits,
        "bits_per_value": m.bits,
    }


def require_matplotlib() -> None:
    """Raises ConfigError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as e:
        raise ConfigError(f"--plot needs matplotlib: pip install 'sgl-kvfetch[bench]' ({e})") from e


def plot_layouts(path: Path, found: Mapping[TensorName, Found], subtitle: str) -> None:
    """The finalists' sizes, a panel a tensor. Raises ConfigError where the file cannot be written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = sum(len(result.finalists) for result in found.values())
    figure, panels = pyplot.subplots(
        len(found),
        1,
        figsize=(10, 1.5 + 0.32 * rows),
        layout="constrained",
        squeeze=False,
        height_ratios=[len(result.finalists) for result in found.values()],
    )
    figure.suptitle(f"Size by layout\n{subtitle}", fontsize=10)
    for axes, (tensor, result) in zip(panels[:, 0], found.items(), strict=True):
        _plot_tensor(axes, tensor, result)
    try:
        figure.savefig(path, dpi=150, format="png")
    except OSError as e:
        raise ConfigError(f"--plot {path} cannot be written: {e}") from e
    finally:
        pyplot.close(figure)


def _plot_tensor(axes: Any, tensor: TensorName, found: Found) -> None:
    best = found.winner
    for row, m in enumerate(found.finalists):
        colour = _WINNER if m is best else _REFERENCE if m.name else _OTHER
        hollow = m.candidate.order == "variance"
        axes.plot(m.bits, row, "o", color=colour, markerfacecolor="white" if hollow else colour, markersize=7)
        axes.annotate(f"{m.bits:.3f}", (m.bits, row), (8, 0), textcoords="offset points", va="center", fontsize=8)
    labels = [f"{m.candidate}{f' ({remark})' if (remark := _remark(m, best)) else ''}" for m in found.finalists]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="bits a value, bitstreams alone", title=tensor.upper())
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)


def _remark(m: Measured, best: Measured) -> str:
    if m.candidate.order == "variance":
        return "cannot be stored"
    return ", ".join(word for word in ("best" if m is best else "", m.name) if word)


def _excess(m: Measured, best: Measured) -> float:
    assert m.bits is not None
    assert best.bits is not None
    return m.bits / best.bits - 1
