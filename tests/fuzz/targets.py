"""What is fuzzed: manifests, segments and bitstreams, which code of ours parses, and the server. Each target takes any
bytes, and fails only by an exception or an assertion.

What a checksum would keep from a decoder, the target seals with a checksum that holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
import xxhash
from aiohttp.test_utils import TestClient, TestServer

from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest, encryption_keys_of
from sgl_kvfetch.codec.container.objects import Chunk
from sgl_kvfetch.codec.container.protect import open_manifest, secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.sides import encode_side, side_places
from sgl_kvfetch.codec.quant.base import Quantised
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.server.app import create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.types import KVGeometry
from tests.segments import make_segment, with_side

Target = Callable[[bytes], object]
KEYS = StoreKeys(b"k" * 32)
TINY = KVGeometry(num_layers=2, num_heads=1, k_head_dim=48, v_head_dim=48, page_size=1, dtype="bfloat16")
CODECS = ("ans", "ans-tables", "deflate", "hevc", "hevc420", "zstd")
SHAPES = ((1, 1, 16), (3, 1, 40), (2, 144, 144), (1, 144, 256))  # frames, height, width


def sealed(body: bytes) -> bytes:
    """Return a manifest with this body, and a checksum that holds."""
    head = struct.pack("<4sHHI", b"KVFM", 2, 3, len(body)) + body
    return head + xxhash.xxh3_128_digest(head)


def manifests(data: bytes) -> None:
    """Decode a manifest's body, and all that is derived from it. What decodes comes back as it was written."""
    try:
        manifest = decode_manifest(sealed(data))
        encryption_keys_of(sealed(data))
    except KVFetchError:
        return
    assert decode_manifest(manifest.encode()) == manifest
    assert manifest.key.manifest_name
    assert manifest.data_sizes
    side_places(manifest)
    with contextlib.suppress(KVFetchError):
        opened = open_manifest(manifest, KEYS)
        SegmentReader(opened, quantiser_from_identity(opened.namespace.quantiser))


@cache
def segments_by_kind() -> list[CodedSegment]:
    sides = {("swa", 1): torch.arange(100, dtype=torch.uint8)}
    made = [
        make_segment(TINY, 4, codec=codec, quantiser=make_quantiser(quantiser))[0]  # type: ignore[arg-type]
        for codec, quantiser in (("ans", "exact"), ("hevc", "uint8"), ("zstd", "uint8"), ("deflate", "exact"))
    ]
    return [with_side(each, *encode_side(sides)) for each in made]


def segments(data: bytes) -> None:
    """Decode a cell one of whose chunks is another bitstream. It gives the values that the writer had, or an error."""
    if len(data) < 3:
        return
    every = segments_by_kind()
    coded, bitstream = every[data[0] % len(every)], data[2:]
    (variant,), offset = coded.manifest.variants, 0
    which = data[1] % len(variant.chunks)
    row = variant.chunks[which]
    offset = sum(chunk.size_bytes for chunk in variant.chunks[:which])
    forged = Chunk(row.codec, len(bitstream), xxhash.xxh3_128_digest(bitstream), row.decoded_checksum)
    chunks = (*variant.chunks[:which], forged, *variant.chunks[which + 1 :])
    content = coded.data[:offset] + bitstream + coded.data[offset + row.size_bytes :]
    changed = msgspec.structs.replace(variant, chunks=chunks)
    manifest = msgspec.structs.replace(coded.manifest, variants=(changed,))
    quantiser = quantiser_from_identity(manifest.namespace.quantiser)
    reader, sound = SegmentReader(manifest, quantiser), SegmentReader(coded.manifest, quantiser)
    cell = list(manifest.cells())[which // manifest.chunks_per_cell]
    with contextlib.suppress(KVFetchError):
        found: Quantised = reader.decode_cell(cell, reader.chunks_in(cell, [content]))
        expected = sound.decode_cell(cell, sound.chunks_in(cell, [coded.data]))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def bitstreams(data: bytes) -> None:
    """Decode a bitstream to frames: a byte each for codec and shape, then the bitstream."""
    if len(data) > 2:
        codec, shape = CODECS[data[0] % len(CODECS)], SHAPES[data[1] % len(SHAPES)]
        with contextlib.suppress(KVFetchError):
            assert get_codec(codec).decode(data[2:], shape).shape == (shape[0], 3, *shape[1:])


class _Served:
    """The server's handlers, over a directory that is deleted at the end."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="kvfetch-fuzz-")
        self.client = self.loop.run_until_complete(self._open())

    async def _open(self) -> TestClient[Any, Any]:
        client = TestClient(TestServer(create_app(ServerConfig(Path(self._folder.name), capacity_bytes=64 << 20))))
        await client.start_server()
        for segment in segments_by_kind():
            for name, content in (
                *segment.data_objects(),
                (segment.manifest.key.manifest_name, segment.manifest.encode()),
            ):
                async with client.put(f"/v1/objects/{name}", data=content) as response:
                    assert response.status < 300, await response.text()
        return client


_served = cache(_Served)
METHODS = ("GET", "PUT", "POST", "DELETE", "HEAD")
PATHS = (
    "/v1/objects", "/v1/lookup", "/v1/notes/pins", "/v1/check", "/v1/folders", "/healthz", "/metrics", "/v1/summary",
    "/v1/segments", "/v1/objects/*", "/v1/notes/profiles/*",
)  # fmt: skip
HEADERS = ("Range", "If-Match", "If-None-Match", "Content-Type", "Accept")


def http(data: bytes) -> None:
    """Send a request: a byte each for method, path and header, then lines with the rest of the path and the header's
    value, then the body. No answer blames the server."""
    if len(data) < 3:
        return
    method, path, header = METHODS[data[0] % 5], PATHS[data[1] % len(PATHS)], HEADERS[data[2] % 5]
    rest, _, after = data[3:].partition(b"\n")
    value, _, body = after.partition(b"\n")
    every = segments_by_kind()
    path = path.replace("*", every[data[1] // 16 % len(every)].manifest.key.manifest_name)
    path += rest.decode("utf-8", "replace")
    text = "".join(c for c in value.decode("latin-1") if c.isprintable())

    async def send() -> None:
        headers = {"Content-Type": "application/json", header: text}
        client = _served().client  # whose own `request` keeps every response
        async with client.session.request(method, client.make_url(path), data=body, headers=headers) as response:
            await response.read()
            assert response.status < 500 or response.status in (503, 507), (response.status, await response.text())

    _served().loop.run_until_complete(send())


def seeds_of(name: str) -> Iterator[bytes]:
    """Yield inputs to begin with, from segments that a writer makes."""
    made = segments_by_kind()
    match name:
        case "manifests":
            for segment in (*made, secure_segment(made[1], KEYS)):
                yield segment.manifest.encode()[12:-16]
        case "segments":
            for kind, segment in enumerate(made):
                first = segment.manifest.variants[0].chunks[0]
                yield bytes([kind, 0]) + segment.data[: first.size_bytes]
        case "http":
            body = msgspec.msgpack.encode({"namespace": made[0].manifest.key.namespace, "page_hashes": bytes(64)})
            yield bytes([2, 1, 3]) + b"\napplication/msgpack\n" + body
            yield bytes([0, 10, 0]) + b"\nbytes=0-99\n"
            yield bytes([1, 0, 2]) + f"/{made[0].manifest.key.manifest_name}\n*\n".encode() + made[0].manifest.encode()
            yield bytes([2, 9, 3]) + b'\napplication/json\n{"prompt": [1, 2, 3], "page_size": 1}'
            yield bytes([1, 2, 3]) + b"/a\napplication/msgpack\n" + msgspec.msgpack.encode({"page_hashes": bytes(32)})
        case "bitstreams":
            for (which, codec), (number, shape) in product(enumerate(CODECS), enumerate(SHAPES)):
                if not (get_codec(codec).is_video and shape[1] < 144):
                    frames = torch.arange(shape[2]).expand(shape[0], 3, *shape[1:]).to(torch.uint8).contiguous()
                    yield bytes([which, number]) + get_codec(codec).encode(frames)


TARGETS: dict[str, Target] = {
    "manifests": manifests,
    "segments": segments,
    "bitstreams": bitstreams,
    "http": http,
}
