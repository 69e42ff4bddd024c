"""SGLang's page hashes: each identifies a page and all pages before it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sglang.srt.mem_cache.utils import get_storage_hash_str

from sgl_kvfetch.errors import UnsupportedError
from sgl_kvfetch.keys import PAGE_HASH_BYTES


def compile_hash_function() -> None:
    """Compile SGLang's hash function, or load it. Call at start.

    Otherwise the first lookup compiles it, for seconds, and SGLang's scheduler dies if a flush finds a lookup that does
    not end within 10 s.
    """
    get_storage_hash_str(array("q", [0]), None, page_size=1)


def hash_bytes(hashes: Sequence[str]) -> list[bytes]:
    """Convert hashes to bytes, the form in which they are stored. Raises UnsupportedError for another kind of hash."""
    try:
        found = [bytes.fromhex(page_hash) for page_hash in hashes]
    except ValueError as e:
        raise UnsupportedError(f"expected hexadecimal page hashes, found {hashes[0]!r}") from e
    if any(len(page_hash) != PAGE_HASH_BYTES for page_hash in found):
        raise UnsupportedError(f"expected page hashes of {PAGE_HASH_BYTES} bytes, found {hashes[0]!r}")
    return found
