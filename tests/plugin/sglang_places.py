"""Every place in SGLang that we depend on, with what we expect there: the rows of `sglang_places.txt`, and those that
follow from tables of the plugin.

A row of the file stands below the module that has the place:

    NAME(PARAMS); has NAMES; mentions NAMES; since VERSION; where PATH: what we need it for

``PARAMS`` are the exact parameter names of a callable. A class ``has`` fields or attributes. A function's own code
``mentions`` names that only exist on instances. A row holds ``since`` a release, or only ``before`` it, and only
``where`` SGLang has another name. Further lines of a row are indented more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from sgl_kvfetch.plugin.identity import DRAFT, FILES, JSON_TEXTS, RELEVANT
from sgl_kvfetch.plugin.seams import REGISTERED_NAMES, WEIGHTS_CHANGE
from sgl_kvfetch.plugin.versions import SGLANG_VERSIONS, before, since


@dataclass(frozen=True)
class Place:
    path: str
    why: str
    params: tuple[str, ...] | None = None
    has: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    versions: tuple[str, ...] = SGLANG_VERSIONS
    patch: str | None = None


def _read(text: str) -> list[Place]:
    places, module = [], ""
    for line in re.sub(r"\n {3,}", " ", text).splitlines():
        if not line.startswith(" "):
            module = line or module
        else:
            places.append(_place(module, *line.strip().split(": ", 1)))
    return places


def _place(module: str, head: str, why: str) -> Place:
    (name, params), *clauses = re.match(r"([\w.]+)(\(.*?\))?", head).groups(), *head.split("; ")[1:]  # type: ignore[union-attr]
    said = dict(clause.split(" ", 1) for clause in clauses)
    has, mentions = (tuple(said.pop(key).split(", ")) if key in said else () for key in ("has", "mentions"))
    versions = since(said.pop("since")) if "since" in said else SGLANG_VERSIONS
    versions = before(said.pop("before")) if "before" in said else versions
    patch = said.pop("where", None)
    assert not said, f"{module}: {head}: unknown clauses: {', '.join(said)}"
    names = None if params is None else tuple(filter(None, params[1:-1].split(", ")))
    return Place(f"{module}.{name}", why, names, has, mentions, versions, patch)


PLACES: tuple[Place, ...] = (
    *_read(Path(__file__).with_suffix(".txt").read_text()),
    Place(
        "sglang.srt.server_args.ServerArgs",
        "the flags that get_model(), get_lora() and get_spec() have, and their defaults",
        has=(
            *("model_path", "revision", "load_format", "dtype", "quantization", "kv_cache_dtype"),
            *("weight_cache_mode", "enable_lora", *sorted(FILES | JSON_TEXTS)),
            *(f"speculative_draft_{name}" for name in ("load_format", "model_path", "model_revision")),
            *(name.rpartition(".")[2] for name in (*RELEVANT, *DRAFT)),
        ),
    ),
    Place(WEIGHTS_CHANGE, "the weights change", params=("self", "recv_req"), patch=WEIGHTS_CHANGE),
    Place(REGISTERED_NAMES, "adds our name to the choices", patch=REGISTERED_NAMES),
)
