"""What threads decode, msgspec knows before: it crashes if two of them are the first to decode a type."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

DECODE = """
import sys
import msgspec
from harness.small_segments import make_segment, page_hashes
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.stores.notes import Pin, decode_pin

manifest = make_segment(page_hashes(1), 0, 1).manifest.encode()
pin = Pin("", 1, bytes(32)).encode()
new = list[type("New", (msgspec.Struct,), {})]
for decode in (
    lambda: decode_manifest(manifest),
    lambda: decode_pin(pin),
    lambda: msgspec.json.decode(b"[]", type=new),
):
    looked_at = []
    sys.setprofile(lambda frame, event, arg: looked_at.append(frame.f_code.co_filename))
    decode()
    sys.setprofile(None)
    print(any(name.endswith("msgspec/_utils.py") for name in looked_at))
"""


def test_decoding_does_not_look_at_annotations() -> None:
    """That of a new type does."""
    done = subprocess.run([sys.executable, "-c", DECODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "True"]
