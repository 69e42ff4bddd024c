"""``kvfetch calibrate``: measures a model once, for the quantiser ``klt``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    model: Annotated[
        str, typer.Option(metavar="PATH", help="The model: whatever transformers loads.", show_default=False)
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            metavar="FILE",
            help="Text like the model's traffic: plain, or JSONL with a field 'prompt'. May be given several times.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="Where to write the profile.", show_default=False)
    ],
    windows: Annotated[int, typer.Option(min=2, help="Windows of text; a fifth of them measure the result.")] = 25,
    context: Annotated[
        int,
        typer.Option(
            min=16, help="Tokens of a window whose KV cache is looked at: KL is what the errors in so many cost."
        ),
    ] = 1024,
    continuation: Annotated[int, typer.Option(min=16, help="Tokens after them that are predicted from it.")] = 512,
    part: Annotated[
        str, typer.Option(metavar="FROM:TO", help="Use this part of the text, in fractions of its tokens.")
    ] = "0:1",
    max_channels: Annotated[
        int,
        typer.Option(
            min=1,
            help="Channels that are transformed together: K and V of some heads and layers. More take fewer bits, and "
            "more time and memory to restore.",
        ),
    ] = 1536,
    tp_size: Annotated[
        int, typer.Option(min=1, help="The --tp-size that SGLang will run with, or a multiple of it.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, or cuda:N.", show_default="cuda if there is one")] = "",
    dtype: Annotated[
        str,
        typer.Option(help="What the model computes in: float32; or bfloat16, whose rounding hides small divergences."),
    ] = "float32",
    seed: Annotated[int, typer.Option(help="Of the tokens that are drawn to judge errors by.")] = 0,
) -> None:
    """Measure how a model's keys and values vary and how much errors in them matter, and write it to a profile.

    SGLang then takes the profile in --hicache-storage-backend-extra-config: {"profile": FILE, ...}. The table that is
    printed says what each target_kl costs in bits, and which one is taken unless the config names another.

    Example:

        kvfetch calibrate --model meta-llama/Llama-3.1-8B --text prompts.jsonl --out llama.profile --tp-size 2
    """
    from sgl_kvfetch.cli import calibrating

    calibrating.run(
        model,
        text,
        out,
        calibrating.Request(
            num_windows=windows,
            num_context=context,
            num_continuation=continuation,
            part=part,
            max_channels=max_channels,
            tp_size=tp_size,
            device=device,
            dtype=dtype,
            seed=seed,
        ),
    )
