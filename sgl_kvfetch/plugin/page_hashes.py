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
        joined = bytes.fromhex("".join(hashes))  # at once: a prompt may have tens of thousands
    except ValueError as e:
        raise UnsupportedError(f"expected hexadecimal page hashes, found {hashes[0]!r}") from e
    if len(joined) != len(hashes) * PAGE_HASH_BYTES or not {2 * PAGE_HASH_BYTES}.issuperset(map(len, hashes)):
        raise UnsupportedError(f"expected page hashes of {PAGE_HASH_BYTES} bytes, found {hashes[0]!r}")
    return [joined[first : first + PAGE_HASH_BYTES] for first in range(0, len(joined), PAGE_HASH_BYTES)]
