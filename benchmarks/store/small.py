"""Many real segments, each as small as it can be: one page of one token, one layer and one head of 48."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from harness.small_segments import FOLDER, make_segment, page_hashes
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.keys import SegmentKey

SEGMENTS_A_PROMPT = 10


@dataclass(frozen=True)
class SmallSegment:
    manifest_name: str
    manifest: bytes
    data_name: str
    data: bytes


def prompt_hashes(prompt: int) -> list[bytes]:
    """Return the hashes of a prompt's pages. No two prompts share one."""
    return page_hashes(SEGMENTS_A_PROMPT, branch=str(prompt))


def prompt_segments(prompt: int) -> Iterator[SmallSegment]:
    """Yield one segment a page. Their manifests are real; the data are the same in all."""
    template = _template()
    digest, previous = template.manifest.variants[0].data_digest, None
    for page, page_hash in enumerate(prompt_hashes(prompt)):
        key = SegmentKey(FOLDER, 1, page_hash)
        manifest = msgspec.structs.replace(
            template.manifest, first_page=page, previous_hash=previous, page_hashes=(page_hash,)
        )
        yield SmallSegment(key.manifest_name, manifest.encode(), key.data_name(digest), template.data)
        previous = page_hash


@cache
def _template() -> CodedSegment:
    return make_segment(page_hashes(1), 0, 1)


def fill(root: Path, prompts: Iterable[int]) -> None:
    """Write the segments of ``prompts`` as files, as if they were copied there. The store need not run."""
    (root / FOLDER).mkdir(parents=True, mode=0o700)
    for prompt in prompts:
        for segment in prompt_segments(prompt):
            _write(root / segment.data_name, segment.data)
            _write(root / segment.manifest_name, segment.manifest)


def _write(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
