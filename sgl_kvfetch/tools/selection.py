"""The segments that ``kvfetch clear`` and ``kvfetch move`` work on."""

from __future__ import annotations

from typing import Annotated

import typer

from sgl_kvfetch.stores import Objects, StoredSegment, folders_named, list_segments, models_of_folders
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
        help="Only the namespaces whose model or digest, as kvfetch inspect shows them, starts with NAME.",
    ),
]


async def select_segments(objects: Objects, prefix: str, model: str | None) -> list[StoredSegment]:
    """List the segments whose objects' names start with ``prefix``, in namespaces of ``model`` if it is not None.

    Warns on stderr if no namespace has this model's name. Raises StoreError.
    """
    segments = await list_segments(objects, prefix)
    if model is None:
        return segments
    folders = folders_named(model, await models_of_folders(objects, segments))
    if not folders:
        typer.echo(f"WARNING: --model {printable(model)}: no namespace of the store has this name", err=True)
    return [segment for segment in segments if segment.key.namespace in folders]
