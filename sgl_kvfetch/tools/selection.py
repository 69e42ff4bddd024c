"""The segments that ``kvfetch clear`` and ``kvfetch move`` work on."""

from __future__ import annotations

from typing import Annotated

import typer

from sgl_kvfetch.stores import Store, StoredSegment, folders_named, list_segments, names_of_folders
from sgl_kvfetch.tools.units import printable

STORE_HELP = (
    "A store (http://HOST:PORT, https://..., s3://BUCKET/PREFIX, file:///DIRECTORY or a directory), or a part of it: "
    "STORE#PREFIX, where PREFIX is the start of object names, such as a namespace that kvfetch inspect shows."
)
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Only what is stored of this model: its name or model_id, as kvfetch inspect shows it; a fingerprint, a "
        "namespace; or the beginning of one of these, if no model has that very name. Exits with 1 if nothing is.",
    ),
]


async def select_segments(store: Store, prefix: str, model: str | None) -> list[StoredSegment]:
    """List the segments whose objects' names start with ``prefix``, in namespaces of ``model`` if it is not None.

    If no namespace is of this model, say so and which models there are, and end with exit code 1. Raises StoreError.
    """
    segments = await list_segments(store, prefix)
    if model is None:
        return segments
    newest_first = sorted(segments, key=lambda segment: segment.modified_s, reverse=True)
    names = await names_of_folders(store, newest_first)
    folders = folders_named(model, names)
    if not folders:
        models = sorted({printable(each.labels.model_name(each.model)) for each in names.values() if each.model})
        stored = ", ".join(models) or "no model"
        typer.echo(f"kvfetch: nothing is stored of --model {printable(model)}; stored: {stored}", err=True)
        raise typer.Exit(1)
    return [segment for segment in segments if segment.key.namespace in folders]
