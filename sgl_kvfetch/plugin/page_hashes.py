"""SGLang's page hashes: each names a page and all before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.keys import PAGE_HASH_BYTES


def hash_bytes(hashes: Sequence[str]) -> list[bytes]:
    """As we store them. Raises UnsupportedError for hashes of another form."""
    try:
        found = [bytes.fromhex(page_hash) for page_hash in hashes]
    except ValueError as e:
        raise UnsupportedError(f"page hashes are not hexadecimal: {hashes[0]!r}") from e
    if any(len(page_hash) != PAGE_HASH_BYTES for page_hash in found):
        raise UnsupportedError(f"page hashes are not {PAGE_HASH_BYTES} bytes: {hashes[0]!r}")
    return found


def hash_tail(key: Any, start: int, last_hash: str | None, page_size: int) -> list[str]:
    """Of the pages of a ``RadixKey`` from token ``start`` on, as host mode has them. ``last_hash``: of the page before,
    if that is known."""
    if start and last_hash is None:
        return hash_tail(key, 0, None, page_size)[start // page_size :]
    hashes: list[str] = get_storage_hash_str(key[start:], last_hash, page_size=page_size)
    return hashes
