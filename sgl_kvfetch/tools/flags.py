"""Finds models that a store has under several sets of flags, whose servers share nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from sgl_kvfetch.keys import Namespace
from sgl_kvfetch.tools.summary import NamespaceSummary


def divided_models(namespaces: Sequence[NamespaceSummary]) -> dict[str, list[str]]:
    """Return, for each model with several sets of flags, a text for each set, such as ``--page-size 16 (12 segments)``.

    A text has what differs between the sets. Models are named as in `kvfetch inspect`. Namespaces of the stages of a
    pipeline have equal flags.
    """
    readable = [(summary.namespace, summary) for summary in namespaces if summary.namespace is not None]
    readable.sort(key=lambda each: (each[0].model, -each[1].stored_bytes))
    found: dict[str, list[str]] = {}
    for identity, group in groupby(readable, key=lambda each: each[0].model):
        num_segments: dict[tuple[str, ...], int] = {}
        name = ""
        for namespace, summary in group:
            name = name or summary.model or identity
            flags = tuple(_flags(namespace, summary))
            num_segments[flags] = num_segments.get(flags, 0) + summary.num_segments
        if len(num_segments) > 1:
            common = set.intersection(*map(set, num_segments))
            found[name if name not in found else identity] = [
                f"{' '.join(flag for flag in flags if flag not in common) or 'no others'} ({_segments(count)})"
                for flags, count in num_segments.items()
            ]
    return found


def _flags(namespace: Namespace, summary: NamespaceSummary) -> Iterator[str]:
    """Yield SGLang's flags and our config keys that a namespace is made of, besides the model."""
    for part in namespace.model_dtype.split(";"):
        name, _, value = part.partition("=")
        if name == "flags":
            yield f"{summary.flags or f'flags with the digest {value}'}"
        elif value != "None":
            yield f"--{name} {value}"
    yield f"--page-size {namespace.page_size}"
    yield f"KV cache in {namespace.kv_dtype}"
    if namespace.attention not in ("mha", "mla"):
        yield namespace.attention
    yield f"quantiser {summary.quantiser or namespace.quantiser}"


def _segments(count: int) -> str:
    return "1 segment" if count == 1 else f"{count} segments"
