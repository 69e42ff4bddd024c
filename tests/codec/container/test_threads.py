"""What threads decode, msgspec knows before: it crashes if two of them are the first to decode a type."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

DECODE = """
import sys
from harness.small_segments import make_segment, page_hashes
from sgl_kvfetch.codec.container.manifest import decode_manifest
from sgl_kvfetch.stores.notes import Pin, decode_pin

manifest = make_segment(page_hashes(1), 0, 1).manifest.encode()
pin = Pin("", 1, bytes(32)).encode()
looked_at = []
sys.setprofile(lambda frame, event, arg: looked_at.append(frame.f_code.co_filename))
{code}
sys.setprofile(None)
sys.exit(any(name.endswith("msgspec/_utils.py") for name in looked_at))
"""


@pytest.mark.parametrize(
    ("code", "looks"),
    [
        ("decode_manifest(manifest)", 0),
        ("decode_pin(pin)", 0),
        ("import msgspec; msgspec.json.decode(b'[]', type=list[type('New', (msgspec.Struct,), {})])", 1),
    ],
)
def test_decoding_does_not_look_at_annotations(code: str, looks: int) -> None:
    assert subprocess.run([sys.executable, "-c", DECODE.format(code=code)]).returncode == looks
