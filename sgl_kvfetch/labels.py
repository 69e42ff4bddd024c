"""Names for people: of a model, whose identity is a fingerprint, and of a quantiser, whose identity has all parameters.

A label decides nothing. Servers with the same weights share segments, whatever they call their model.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping
from typing import Annotated

import msgspec
import xxhash
from msgspec import Meta

MAX_LABEL_CHARS = 128
_DIGEST_CHARS = 16

_Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
_KLT = re.compile(r"klt\(profile=(?P<profile>[0-9a-f]{32});step=(?P<step>[0-9.e+-]{1,16})\)")
_BINS = re.compile(r"cachegen\(k=([0-9,]+);v=([0-9,]+)\)")


class Labels(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the writer of a segment calls its model and its quantiser, and the flags that its namespace has a digest of;
    empty if it gave no name."""

    model: _Label = ""
    quantiser: _Label = ""
    flags: _Label = ""

    def model_name(self, identity: str) -> str:
        """Return the name to show for a namespace's ``model``: the label, or else the user's own ``model_id``."""
        return self.model or identity.removeprefix("id:")

    def quantiser_name(self, identity: str) -> str:
        """Return the name to show for a namespace's ``quantiser``, such as ``klt 6.5e-4`` or ``cachegen 32/16``.

        Writers choose the identity, so it may be any text. It is shown as it is if it only looks like ``klt``.
        """
        if self.quantiser:
            return self.quantiser
        if match := _KLT.fullmatch(identity):
            try:
                return f"klt step {float(match['step']):.3g}"
            except ValueError:
                return identity
        if match := _BINS.fullmatch(identity):
            k, v = ("/".join(dict.fromkeys(bins.split(","))) for bins in match.groups())
            return f"cachegen {k}" if k == v else f"cachegen k {k}, v {v}"
        return identity.partition("(")[0]


def profile_digest(identity: str) -> str | None:
    """Return the digest of the profile in a quantiser's identity; None if it has none."""
    match = _KLT.fullmatch(identity)
    return match and match["profile"]


def label_of_model(served_name: str, path: str) -> str:
    """Return the label for a model: the name that it is served under, or its directory's."""
    name = served_name
    if served_name == path and (path.startswith("/") or os.path.isdir(path)):
        parts = [part for part in path.split("/") if part]
        name = parts[-1] if parts else ""
        if len(parts) > 2 and parts[-2] == "snapshots":  # Hugging Face's cache: models--ORG--NAME/snapshots/REVISION
            name = parts[-3].removeprefix("models--").replace("--", "/")
    return name[:MAX_LABEL_CHARS]


def label_of_flags(flags: Mapping[str, object]) -> str:
    """Return the label for flags and their JSON values: ``is_embedding=true, kv_cache_dtype=fp8_e4m3``."""
    texts = (
        f"{name}={value if isinstance(value, str) else msgspec.json.encode(value, order='sorted').decode()}"
        for name, value in sorted(flags.items())
    )
    return ", ".join(texts)[:MAX_LABEL_CHARS]


def label_of_request(request_id: str) -> str:
    """Return the label for a request: its id; of a long one, the first 128 characters and a digest of all.

    Users of SGLang's API choose ids, of any length and of any characters, and every server keeps its last ones. The
    label is valid Unicode, and it is its own label: what people copy from a server names the same request.
    """
    # SGLang's `Engine` takes ids that are no strings, too, and there may be lone surrogates.
    valid = str(request_id).encode("utf-8", "backslashreplace")
    text = valid.decode()
    if len(text) <= MAX_LABEL_CHARS + 1 + _DIGEST_CHARS:
        return text
    return f"{text[:MAX_LABEL_CHARS]}~{xxhash.xxh3_64_hexdigest(valid)}"


def label_of_klt(target_kl: float) -> str:
    """Return the label for ``klt`` at a target, in nats: ``klt 6.5e-4``."""
    digits, _, exponent = f"{target_kl:.1e}".partition("e")
    return f"klt {digits.removesuffix('.0')}e{int(exponent)}"


def are_named(name: str, identity: str, labels: Labels) -> bool:
    """Return whether somebody who writes ``name`` means this model: its label, or that label's last part, its
    ``model_id`` or fingerprint, with ``id:`` or ``weights:`` or without, or the path of its directory."""
    label = labels.model
    known = {label, label.rpartition("/")[2], identity, identity.partition(":")[2]} - {""}
    return name in known or (name.startswith("/") and name.rstrip("/").rpartition("/")[2] == label)
