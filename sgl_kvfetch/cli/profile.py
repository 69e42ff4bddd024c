"""``kvfetch profile``: how fast this machine decodes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from sgl_kvfetch.cli.options import JsonOption


def profile(
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where to write the decode profile.", show_default=False),
    ] = None,
    codecs: Annotated[str, typer.Option(metavar="NAMES", help="One or more, as in hevc,zstd.")] = "hevc,zstd",
    resolutions: Annotated[
        str, typer.Option(metavar="NAMES", help="Of the video codecs' pictures.")
    ] = "240p,480p,640p,1080p",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the chunk that is decoded.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Its heads.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, help="Their width.")] = 128,
    device: Annotated[
        Literal["auto", "cpu", "nvdec"],
        typer.Option(help="What decodes video; auto is NVDEC where it decodes one of the codecs."),
    ] = "auto",
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Decode up to so many at once.", show_default="cores; with NVDEC two a video engine"
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Chunks a session; the figures are medians.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the chunk's integers.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Measure how long this machine takes to decode a chunk, for each codec and resolution and for 1, 2, ... at once.

    On NVDEC frames end in the GPU's memory, as in device mode; codecs that it does not decode are measured on the CPU,
    on the same sessions. The chunk is made up (three layers of integers that spread as transform coefficients do), so
    that its sizes say little of those of real chunks, which their manifests give. Other programs that run meanwhile
    make the figures worse.

    Example:

        kvfetch profile --out decode-profile.json
    """
    from sgl_kvfetch.cli import profiling

    profiling.run(
        profiling.Request(
            out=out,
            codecs=tuple(codecs.split(",")),
            resolutions=tuple(resolutions.split(",")),
            tokens=tokens,
            heads=heads,
            head_dim=head_dim,
            device=device,
            concurrency=concurrency,
            rounds=rounds,
            seed=seed,
            as_json=as_json,
        )
    )
