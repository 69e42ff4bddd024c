"""``kvfetch search-layout``: which layout a model's own KV is smallest in."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sgl_kvfetch.types import TENSORS


class Resolution(StrEnum):
    p240 = "240p"
    p480 = "480p"
    p640 = "640p"
    p1080 = "1080p"


class Tensor(StrEnum):
    k = "k"
    v = "v"


class SearchQuantiser(StrEnum):
    klt = "klt"
    uint8 = "uint8"
    cachegen = "cachegen"


def search_layout(
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The model, as transformers loads it.", show_default=False)
    ],
    text: Annotated[
        Path,
        typer.Option(metavar="FILE", help="Plain text, or JSONL with a field 'prompt'.", show_default=False),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The model's profile, which keeps what is found.", show_default=False),
    ] = None,
    quantiser: Annotated[
        SearchQuantiser, typer.Option(help="All but klt do without a profile, and only show what they find.")
    ] = SearchQuantiser.klt,
    target_kl: Annotated[float, typer.Option(metavar="NATS", help="The accuracy that klt quantises for.")] = 1e-4,
    tensor: Annotated[Tensor | None, typer.Option(help="Search for one of them.", show_default="both")] = None,
    resolution: Annotated[Resolution, typer.Option(help="The largest picture.")] = Resolution.p240,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a span, as they will be stored.")] = 1024,
    windows: Annotated[int, typer.Option(min=1, help="Spans of the text to measure the finalists on.")] = 4,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Encoders side by side.", show_default="one a CPU core")
    ] = None,
    device: Annotated[str, typer.Option(help="Where the model runs.")] = "cpu",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the sizes (PNG).", show_default=False)] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all that was measured.", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Leave the profile as it is.")] = False,
) -> None:
    """Find the layout in which HEVC codes a model's KV smallest, for K and for V, and keep it in the profile if it is
    1% smaller than the one that is taken without it.

    Candidates are how heads, dimensions and blocks of neighbouring tokens are tiled, how tokens are spread over frames,
    and in how many frames a span lies (KVFetcher, section 3.2). Sizes are those of the real codec, on the KV that the
    model has for the text: first on three layers and one span, the best then on all layers and spans.

    Examples:

        kvfetch search-layout --model MODEL --text sample.txt --profile model.kvprofile

        kvfetch search-layout --model MODEL --text sample.txt --quantiser uint8 --plot sizes.png
    """
    from sgl_kvfetch.cli import layout_search

    layout_search.run(
        layout_search.Request(
            model=model,
            text=text,
            profile=profile,
            quantiser=quantiser,
            target_kl=target_kl,
            tensors=tuple(name for name in TENSORS if tensor in (None, name)),
            resolution=resolution,
            span_tokens=tokens,
            num_windows=windows,
            workers=workers or os.cpu_count() or 1,
            device=device,
            plot=plot,
            json_file=json_file,
            dry_run=dry_run,
        )
    )
