"""``kvfetch encode``: codes stored segments again, in the background."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from typing import Annotated

import typer

from sgl_kvfetch.cli.options import JsonOption, TokenFileOption, TokenOption, read_token


class EncoderChoice(StrEnum):
    """As EncoderName in sgl_kvfetch.codecs, which imports torch."""

    AUTO = "auto"
    CPU = "cpu"
    NVENC = "nvenc"


def encode(
    store: Annotated[
        str,
        typer.Option(metavar="URL", help="http://HOST:PORT, https://... or file:///DIRECTORY.", show_default=False),
    ],
    watch: Annotated[
        bool, typer.Option("--watch/--once", help="Go on with what is written later, or end when all is done.")
    ] = False,
    codec: Annotated[str, typer.Option(metavar="NAMES", help="One or more, as in hevc,hevc420.")] = "hevc",
    resolutions: Annotated[
        str, typer.Option(metavar="NAMES", help="One or more of 240p,480p,640p,1080p. The first is readers' default.")
    ] = "240p",
    keep_source: Annotated[
        bool, typer.Option("--keep-source", help="Keep other variants beside these, for readers without the codec.")
    ] = False,
    namespace: Annotated[
        str, typer.Option(metavar="PREFIX", help="Only objects whose names begin so: a namespace, or a part of one.")
    ] = "",
    encoder: Annotated[
        EncoderChoice,
        typer.Option(help="What makes HEVC: auto is NVENC where this machine's GPU has one, the CPU elsewhere."),
    ] = EncoderChoice.AUTO,
    workers: Annotated[
        int,
        typer.Option(
            min=1, max=256, help="Segments at once: a thread each, and its bytes in memory.", show_default="cores"
        ),
    ] = os.cpu_count() or 1,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace",
            min=0,
            metavar="SECONDS",
            help="How long replaced data stay, for readers that were told of them. At least what a fetch may take; "
            "0 only where nobody else uses the store.",
        ),
    ] = 60.0,
    poll_interval_s: Annotated[
        float, typer.Option("--poll-interval", min=0.05, metavar="SECONDS", help="With --watch: between two looks.")
    ] = 5.0,
    token: TokenOption = None,
    token_file: TokenFileOption = None,
    as_json: JsonOption = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print each step on stderr.")] = False,
) -> None:
    """Code what servers wrote in a fast codec again, as video, at one or more resolutions.

    Runs on any machine, beside servers and other encoders; needs neither the model nor its profile. HEVC is coded on
    the CPU (libx265), or on NVENC: consumer and L4, L20 or L40S GPUs have one; H100, H200 and A100 have none. A
    segment's new data are put, read back and decoded (on the CPU) before its manifest is replaced, and the old data are
    deleted only after that: it may be killed at any time, and goes on from there.
    What is in the wanted variants already is left alone. For the grace period a segment takes room twice: a store that
    is nearly full evicts others for it.

    Exit code 0 if all is well, 1 if a segment could not be encoded, 2 if the store cannot be used.

    Examples:

        kvfetch encode --store http://127.0.0.1:8700 --watch

        kvfetch encode --store file:///var/cache/kv --resolutions 240p,480p --keep-source
    """
    from sgl_kvfetch.cli import encoding

    request = encoding.Request(
        url=store,
        token=read_token(token, token_file),
        watch=watch,
        codecs=codec.split(","),
        resolutions=resolutions.split(","),
        keep_source=keep_source,
        namespace=namespace,
        encoder=encoder.value,
        workers=workers,
        grace_s=grace_s,
        poll_interval_s=poll_interval_s,
        as_json=as_json,
        verbose=verbose,
    )
    if not asyncio.run(encoding.run(request)):
        raise typer.Exit(1)
