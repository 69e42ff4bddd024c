"""What is fuzzed: each target takes any bytes, and fails only by an exception or an assertion.

What a checksum would keep from a decoder, the target seals with a checksum that holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import hiredis
import msgspec
import torch
import xxhash
from aiohttp.test_utils import TestClient, TestServer
from redis.exceptions import InvalidResponse, ResponseError
from safetensors import safe_open
from safetensors.torch import save

from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest, encryption_keys_of
from sgl_kvfetch.codec.container.objects import Chunk
from sgl_kvfetch.codec.container.protect import open_manifest, secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.container.sides import encode_side, side_places
from sgl_kvfetch.codec.quant.base import Quantised
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.codec.quant.registry import make_quantiser, quantiser_from_identity
from sgl_kvfetch.errors import KVFetchError
from sgl_kvfetch.server.app import create_app
from sgl_kvfetch.server.config import ServerConfig
from sgl_kvfetch.stores import indexed_s3, wire
from sgl_kvfetch.stores.base import ObjectInfo
from sgl_kvfetch.stores.http import decode_hits, decode_json, decode_listed
from sgl_kvfetch.stores.notes import ListedProfile, ProfileHeader, open_sealed, parse_head, profile_rows
from sgl_kvfetch.stores.redis_index import IndexOptions, PageIndex
from sgl_kvfetch.types import KVGeometry
from tests.codec.quant.profiles import make_profile
from tests.segments import make_segment, with_side

Target = Callable[[bytes], object]
KEYS = StoreKeys(b"k" * 32)
TINY = KVGeometry(num_layers=2, num_heads=1, k_head_dim=48, v_head_dim=48, page_size=1, dtype="bfloat16")
CODECS = ("ans", "ans-tables", "deflate", "hevc", "hevc420", "zstd")
PROFILE, CONTENT = f"{'0' * 32}/{'1' * 32}", b"a profile's file"
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


class _Pipeline:
    """Answers every call with what a server sent."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._num_calls = 0

    def pipeline(self, **_: object) -> _Pipeline:
        self._num_calls = 0
        return self

    def eval(self, *_: object) -> None:
        self._num_calls += 1

    async def execute(self) -> Sequence[object]:
        parser = hiredis.Reader(protocolError=InvalidResponse, replyError=ResponseError)
        parser.feed(self._data)
        answers = [parser.gets() for _ in range(self._num_calls)]
        if False in answers:
            raise ConnectionError("closed")
        return answers

    async def aclose(self) -> None:
        pass


def redis(data: bytes) -> None:
    """Read what a Redis server sends as its answers to lookups of eight pages."""
    hashes = [bytes([page]) * 32 for page in range(8)]
    index = PageIndex(IndexOptions("redis://localhost:1"), "s3://bucket")
    index._client = _Pipeline(data)

    async def ask() -> None:
        with contextlib.suppress(KVFetchError):
            entries = await index.find("0" * 32 + ".0-1", hashes)
            for page, end, entry in indexed_s3._parts(entries):
                assert page < end <= 8
                assert len(entry.key("0" * 32 + ".0-1").manifest_name) < 200
        with contextlib.suppress(KVFetchError):
            await index.last_uses([segment.manifest.key for segment in segments_by_kind()])

    asyncio.run(ask())


def profiles(data: bytes) -> None:
    """Parse the header of a stored profile, and describe it to people."""
    stored = struct.pack("<4sI", b"KVFP", len(data)) + data
    for num_bytes in (len(CONTENT), len(CONTENT) + 16, len(CONTENT) + 36):
        with contextlib.suppress(KVFetchError):
            head = parse_head(PROFILE, stored + CONTENT + bytes(36), len(stored) + num_bytes)
            info = ObjectInfo(PROFILE, len(stored) + num_bytes, 0.0)
            (row,) = profile_rows([ListedProfile(info, head)], KEYS)
            assert msgspec.json.encode(row)
            open_sealed(stored + CONTENT + bytes(36), head, KEYS)


@cache
def _profile_tensors() -> dict[str, torch.Tensor]:
    return make_profile(num_layers=1, num_heads=1, head_dim=8, cell_layers=1, cell_heads=1)._tensors()


def profile_files(data: bytes) -> None:
    """Read a profile's file with other metadata, or with another header: a first byte chooses."""
    if not data:
        return
    content = save(_profile_tensors(), {"kvfetch": data[1:].decode("utf-8", "replace")})
    if data[0] % 2:
        content = struct.pack("<Q", len(data) - 1) + data[1:] + content
    with tempfile.TemporaryDirectory(prefix="kvfetch-fuzz-") as folder, contextlib.suppress(KVFetchError):
        (path := Path(folder, "profile")).write_bytes(content)
        assert load_profile(path).digest


def answers(data: bytes) -> None:
    """Decode what an HTTP store answers: a first byte chooses to what."""
    if not data:
        return
    kinds: tuple[Any, ...] = wire.Deleted, wire.Checked, wire.Folders, wire.Notes
    with contextlib.suppress(KVFetchError):
        match data[0] % (len(kinds) + 2):
            case 0:
                decode_hits("a lookup", data[1:], 1 << 20)
            case 1:
                decode_listed(data[1:], "")
            case which:
                decode_json("an answer", data[1:], kinds[which - 2])


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
        case "profiles":
            weights, digest = PROFILE.split("/")
            header = ProfileHeader(1, weights, digest, hashlib.sha256(CONTENT).hexdigest(), len(CONTENT), "a", 1e-3)
            yield msgspec.json.encode(header)
            encryption = {"key": KEYS.ids[0], "salt": "0" * 64}
            yield msgspec.json.encode(msgspec.to_builtins(header) | {"encryption": encryption})
        case "profile_files":
            with tempfile.TemporaryDirectory() as folder:
                make_profile(num_layers=1, num_heads=1, head_dim=8, cell_layers=1, cell_heads=1).save(Path(folder, "p"))
                with safe_open(Path(folder, "p"), "pt") as file:
                    yield b"\0" + file.metadata()["kvfetch"].encode()
                yield b"\1" + Path(folder, "p").read_bytes()[8:1500]
        case "answers":
            yield b"\0" + msgspec.msgpack.encode([[made[0].manifest.encode(), 0, 4]])
            yield b"\1" + msgspec.json.encode(ObjectInfo(made[0].manifest.key.manifest_name, 1, 0.0))
            yield b"\5" + msgspec.json.encode(wire.Notes([ObjectInfo(PROFILE, 1, 0.0)]))
        case "redis":
            entry = struct.pack("<QB32s", 0, 3, bytes(32))
            yield b"*8\r\n" + (b"$41\r\n" + entry + b"\r\n") * 8
            yield b"*4\r\n$3\r\n123\r\n" + b"$-1\r\n" * 3
            yield b"-ERR no\r\n:1\r\n"
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
    "redis": redis,
    "profiles": profiles,
    "profile_files": profile_files,
    "answers": answers,
}
