"""Segments whose writers chose odd texts for what people are shown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import msgspec

from harness.small_segments import make_segment, page_hashes
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.keys import Labels
from tests.segments import with_labels

CHAIN = page_hashes(4)
_PROFILE = "0123456789abcdef" * 2
_STEPS = ("1.2.3", "", "e", "+-+-", ".", "1e", "1e99999999999", "0")
TEXTS = (
    *(f"klt(profile={_PROFILE};step={step})" for step in _STEPS),
    "cachegen(k=,;v=,)",
    "cachegen(k=" + "9" * 600 + ";v=1)",
    "klt(",
    "",
    "id:",
    "[/bold]{0}%s",
    "\x1b[2J\r\n\0\N{RIGHT-TO-LEFT OVERRIDE}",
    "\N{PILE OF POO}" * 128,
)
PART_NAMES = ("", "../../outside", "a\nb", "\x1b[2J", ".", "\N{PILE OF POO}" * 64)


def odd_segments() -> Iterator[CodedSegment]:
    """Yield segments of namespaces of their own, each with an odd identity, label or part name."""
    plain = make_segment(CHAIN, 0, 4)
    for text in TEXTS:
        for field in ("model", "quantiser", "model_dtype", "attention"):
            yield _with(plain, namespace=replace(plain.manifest.namespace, **{field: text}))  # type: ignore[arg-type]
        labelled = _with(plain, namespace=replace(plain.manifest.namespace, model=f"labelled {text}"))
        yield with_labels(labelled, Labels(text[:128], text[:128]))
    for name in PART_NAMES:
        parts = tuple(replace_name(part, f"{name}{part.name}"[-64:]) for part in plain.manifest.parts)
        yield _with(plain, namespace=replace(plain.manifest.namespace, model=f"parts {name}"), parts=parts)


def _with(segment: CodedSegment, **fields: object) -> CodedSegment:
    return replace(segment, manifest=msgspec.structs.replace(segment.manifest, **fields))


def replace_name(part: object, name: str) -> object:
    return msgspec.structs.replace(part, name=name)  # type: ignore[type-var]
