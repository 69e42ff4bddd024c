"""Says whether a stored manifest is signed, and whether by our key."""

from __future__ import annotations

from typing import Literal

from sgl_kvfetch.codec import ManifestKeys, split_signature

Signature = Literal["good", "wrong", "missing", "signed (not checked)", "none"]


def signature_of(content: bytes, keys: ManifestKeys | None) -> Signature:
    """Check a manifest's signature. ``content``: the whole stored object. Without ``keys``, none is expected."""
    manifest, signature = split_signature(content)
    if keys is None:
        return "signed (not checked)" if signature else "none"
    if not signature:
        return "missing"
    return "good" if keys.is_signed(manifest, signature) else "wrong"
