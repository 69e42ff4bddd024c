"""A second reader of the stored format, written from docs/format.md alone. It uses nothing of the package: where it
cannot read, the document is incomplete.

It computes in float64 and rounds once, as the document's reference does, so its values are the same on every machine.
"""

from __future__ import annotations

import hmac
import json
import math
import re
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import xxhash
import zstandard
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TABLES = Path(__file__).parents[2] / "sgl_kvfetch/codec/bitstream/ans_tables.npz"  # a part of the format
BIT_TYPES = {"float32": "<u4", "bfloat16": "<u2", "float16": "<u2", "float8_e4m3fn": "u1", "float8_e5m2": "u1"}


def parse_manifest(raw: bytes) -> dict[str, Any]:
    assert len(raw) <= 1 << 20
    magic, major, _minor, length = struct.unpack_from("<4sHHI", raw)
    end = 12 + length + 16
    assert (magic, major, end) == (b"KVFM", 2, len(raw))
    assert xxhash.xxh3_128_digest(raw[:-16]) == raw[-16:]
    body: dict[str, Any] = msgspec.msgpack.decode(raw[12:-16])
    assert len(body["namespace"]) == 12
    assert all(len(text) <= 2048 for text in body["namespace"].values() if isinstance(text, str))
    return body


def hashes_of(tokens: list[int], page_size: int, salt: str = "") -> list[bytes]:
    """The hashes of a prompt's whole pages."""
    last, found = b"", []
    if salt:
        raw = salt.encode()
        last = sha256(b"sglang-cache-namespace-v1" + b"\0\1" + struct.pack("<Q", len(raw)) + raw).digest()
    for page in range(len(tokens) // page_size):
        own = tokens[page * page_size : (page + 1) * page_size]
        last = sha256(last + struct.pack(f"<{page_size}I", *own)).digest()
        found.append(last)
    return found


def fingerprint_of(folder: Path) -> str:
    """What follows ``weights:`` in a namespace's ``model``. Without links into Hugging Face's cache."""
    configs = ["config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "quantization_config.json"]
    lines = []
    for file in sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda f: f.relative_to(folder).parts):
        name = file.relative_to(folder)
        if any(part.startswith(".") for part in name.parts):
            continue
        if file.name in configs or file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".py"):
            content = file.read_bytes()
            digest = xxhash.xxh3_128_hexdigest(content) if content else "empty"
            lines.append(f"{'/'.join(name.parts)}\0{digest}\n")
    return xxhash.xxh3_128_hexdigest("".join(lines).encode())


def folder_of(body: dict[str, Any]) -> str:
    text = json.dumps(body["namespace"], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    first, end = body["first_head"], body["first_head"] + body["num_heads"]
    return f"{xxhash.xxh3_128_hexdigest(text.encode())}.{first}-{end}"


def names_of(body: dict[str, Any]) -> list[str]:
    """The names of the manifest, of each variant's data and of each object of side pages."""
    pages = len(body["page_hashes"]) // 32
    stem = f"{folder_of(body)}/{pages}-{body['page_hashes'][-32:].hex()}"
    return (
        [f"{stem}.kvm"]
        + [f"{stem}.{variant['data_digest']}.kvd" for variant in body["variants"]]
        + [f"{stem}.{side['data_digest']}.kvd" for side in body.get("sides", [])]
    )


def labels_of(body: dict[str, Any]) -> tuple[str, str]:
    """What people call the model and the quantiser; empty where the writer did not say."""
    labels = body.get("labels", {})
    return labels.get("model", ""), labels.get("quantiser", "")


def read_sides(raw: bytes, objects: list[bytes]) -> dict[tuple[str, int], bytes]:
    """The side pages by pool and page, from a manifest and the contents of its objects of side pages."""
    found = {}
    for side, data in zip(parse_manifest(raw).get("sides", []), objects, strict=True):
        assert xxhash.xxh3_128_hexdigest(data) == side["data_digest"]
        offset = 0
        for pool, page, num_bytes, chunks in side["pages"]:
            assert (pool, page) not in found
            content = b""
            for number, (codec, size, coded, decoded) in enumerate(chunks):
                bitstream = data[offset : offset + size]
                offset += size
                assert xxhash.xxh3_128_digest(bitstream) == coded
                expected = min(4194304, num_bytes - 4194304 * number)
                part = unzstd(bitstream) if codec == "zstd" else unbfloat16(codec, bitstream, expected)
                assert xxhash.xxh3_128_digest(part) == decoded
                assert len(part) == expected
                content += part
            assert len(content) == num_bytes
            found[pool, page] = content
        assert offset == len(data)
    return found


def read_values(
    raw: bytes, data: bytes, variant: int = 0, profile: bytes | None = None, levels: Sequence[bytes] = ()
) -> bytes:
    """The bits of all cells' values in storage order, K before V, from a manifest, a variant's data object and those of
    its first levels."""
    body = parse_manifest(raw)
    space, coding = body["namespace"], body["variants"][variant]
    assert xxhash.xxh3_128_hexdigest(data) == coding["data_digest"]
    cells = cells_of(body)
    assert len(coding["chunks"]) == len(cells) * len(body["parts"])
    assert sum(size for _, size, _, _ in coding["chunks"]) == len(data)
    chunks = iter(coding["chunks"])
    digits = [pieces_of(level, content) for level, content in zip(coding.get("levels", ()), levels, strict=False)]
    known = None if profile is None else Profile.parse(profile)
    out, offset = [], 0
    for cell in cells:
        parts = {}
        for name, layout in body["parts"]:
            codec, size, coded, decoded = next(chunks)
            bitstream = data[offset : offset + size]
            offset += size
            assert xxhash.xxh3_128_digest(bitstream) == coded
            if codec == "ladder":
                assert layout == "coefficients"
                finer = [next(pieces) for pieces in digits]
                assert bitstream[0] == 1 + len(coding.get("levels", ())) + coding.get("num_dropped", 0)
                part = unladder([bitstream, *(piece for piece, _ in finer)], *cell.shape(space, layout))
                decoded = finer[-1][1] if finer else decoded
            elif layout:
                part = integers_of(bitstream, codec, coding["layouts"][layout], cell.shape(space, layout))
            else:
                assert codec == "zstd"
                part = np.frombuffer(unzstd(bitstream), np.uint8)
            assert xxhash.xxh3_128_digest(part.tobytes()) == decoded
            parts[name] = part
        out += values_of(cell, space, parts, known)
    return b"".join(x.tobytes() for x in out)


def pieces_of(level: dict[str, Any], data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The chunks of a level, with the checksums of what they lead to."""
    assert xxhash.xxh3_128_hexdigest(data) == level["data_digest"]
    offset = 0
    for codec, size, coded, decoded in level["chunks"]:
        assert codec == "digits"
        assert xxhash.xxh3_128_digest(data[offset : offset + size]) == coded
        yield data[offset : offset + size], decoded
        offset += size
    assert offset == len(data)


LAYOUT_FIELDS = "type", "width", "height", "head_rows", "head_cols", "dim_rows", "dim_cols", "token_rows", "token_cols"


def decrypted(raw: bytes, objects: Sequence[bytes], key: bytes, variant: int = 0) -> tuple[bytes, list[bytes]]:
    """A manifest and a variant's data object, then those of its levels, as they would be without encryption. The
    manifest has that variant alone."""
    body = parse_manifest(raw)
    coding = body["variants"][variant]
    layouts = [
        [name, *(layout[field] for field in LAYOUT_FIELDS if field in layout)]
        for name, layout in sorted(coding["layouts"].items())
    ]
    first, *levels = objects
    count = len(coding.get("levels", ())) + coding.get("num_dropped", 0)
    rows, plain = _decrypted_object(body, coding, first, key, [count, 0, *layouts])
    contents = [plain]
    for number, (level, data) in enumerate(zip(coding.get("levels", []), levels, strict=True), 1):
        changed, plain = _decrypted_object(body, level, data, key, [count, number, *layouts])
        rows["levels"][number - 1] = changed
        contents.append(plain)
    body["variants"] = [rows]
    packed = msgspec.msgpack.encode(body)
    head = struct.pack("<4sHHI", b"KVFM", 2, 8, len(packed)) + packed
    return head + xxhash.xxh3_128_digest(head), contents


def _decrypted_object(
    body: dict[str, Any], rows: dict[str, Any], data: bytes, key: bytes, inside: list[Any]
) -> tuple[dict[str, Any], bytes]:
    """An object's map in the manifest, and its bytes. ``inside``: the last element of its place."""
    encryption = rows["encryption"]
    place = msgspec.msgpack.encode(
        [
            folder_of(body),
            *(body[name] for name in ("first_page", "previous_hash", "page_hashes")),
            *(body[name] for name in ("span_pages", "cell_layers", "cell_heads", "coefficients", "parts")),
            body.get("expires"),
            inside,
        ]
    )
    secret = hmac.digest(encryption["salt"], key, "sha256")  # RFC 5869, with one block of output
    aes = AESGCM(hmac.digest(secret, b"sgl_kvfetch data\0" + place + b"\1", "sha256"))
    table = msgspec.msgpack.decode(aes.decrypt(b"\xff" * 12, encryption["table"], None))
    assert xxhash.xxh3_128_hexdigest(data) == rows["data_digest"]
    pieces, chunks = [], []
    for number, (row, (codec, checksum)) in enumerate(zip(rows["chunks"], table, strict=True)):
        assert (row[0], row[3]) == ("aes-256-gcm", bytes(16))
        stored, data = data[: row[1]], data[row[1] :]
        assert xxhash.xxh3_128_digest(stored) == row[2]
        piece = aes.decrypt(number.to_bytes(12), stored, None)
        pieces.append(piece)
        chunks.append([codec, len(piece), xxhash.xxh3_128_digest(piece), checksum])
    plain = b"".join(pieces)
    kept = {name: value for name, value in rows.items() if name != "encryption"}
    return kept | {"chunks": chunks, "data_digest": xxhash.xxh3_128_hexdigest(plain)}, plain


# Cells


@dataclass
class Cell:
    layers: range  # of the model
    heads: range  # of the model
    tokens: range  # of the sequence
    coefficients: int
    profile_cell: str

    def shape(self, space: dict[str, Any], layout: str) -> tuple[int, ...]:
        if layout == "coefficients":
            return self.coefficients, len(self.tokens)
        return len(self.tokens), len(self.layers), len(self.heads), space[f"{layout}_head_dim"]


def cells_of(body: dict[str, Any]) -> list[Cell]:
    space, size = body["namespace"], body["namespace"]["page_size"]
    num_pages, first_layer = len(body["page_hashes"]) // 32, space["first_layer"]
    last_layer, cell_layers, cell_heads = first_layer + space["num_layers"], body["cell_layers"], body["cell_heads"]
    cells = []
    for page in range(0, num_pages, body["span_pages"]):
        end_page = min(page + body["span_pages"], num_pages)
        tokens = range((body["first_page"] + page) * size, (body["first_page"] + end_page) * size)
        counts = iter(body["coefficients"])
        for layer in range(first_layer, last_layer, cell_layers):
            for head in range(body["first_head"], body["first_head"] + body["num_heads"], cell_heads):
                layers = range(layer, min(layer + cell_layers, last_layer))
                name = f"{layer // cell_layers}.{head // cell_heads}"
                cells.append(Cell(layers, range(head, head + cell_heads), tokens, next(counts, 0), name))
    return cells


# Codecs and layouts


def unzstd(bitstream: bytes) -> bytes:
    assert zstandard.frame_content_size(bitstream) >= 0
    return zstandard.ZstdDecompressor().decompress(bitstream, allow_extra_data=False)


def unbfloat16(codec: str, bitstream: bytes, num_bytes: int) -> bytes:
    assert (codec, num_bytes % 2) == ("bfloat16", 0)
    num_values = num_bytes // 2
    tokens = -(-num_values // 384)
    exponents = unans_tables(bitstream[num_values:], 384, tokens).T.reshape(-1)[:num_values].astype(np.uint16)
    rotated = exponents << 8 | np.frombuffer(bitstream, np.uint8, num_values)
    return bytes((rotated >> 1 | rotated << 15).astype("<u2").tobytes())


def unans_tables(bitstream: bytes, num_rows: int, num_tokens: int) -> np.ndarray:
    count, size = struct.unpack_from("<BI", bitstream)
    own = np.frombuffer(zstandard.ZstdDecompressor().decompress(bitstream[5 : 5 + size]), "<u2").reshape(count, 257)
    assert 1 <= count <= 16
    assert (own.sum(1) == 1024).all()
    assert own[:, 256].all()
    common = np.load(TABLES)
    choice = np.minimum(np.arange(64), count - 1)[:, None].repeat(32, 1)
    tables = {"slots": np.concatenate((own, common["slots"][17:18])), "choice": choice, "gains": common["gains"]}
    return unans(bitstream[5 + size :], num_rows, num_tokens, tables, count)


class Lanes:
    """The states of a piece of a bitstream of ``ans``, its words and its escaped integers."""

    def __init__(self, piece: bytes, lanes: int) -> None:
        self.piece, self.front, self.back = piece, 4 * lanes, len(piece)
        self.states = list(struct.unpack_from(f"<{lanes}I", piece))
        assert min(self.states) >= 1 << 16

    def take(self, lane: int, slots: np.ndarray) -> int:
        state, ends = self.states[lane], slots.cumsum()
        symbol = int(np.searchsorted(ends, state % 1024, side="right"))
        state = int(slots[symbol]) * (state // 1024) + state % 1024 - int(ends[symbol] - slots[symbol])
        if state < 1 << 16:
            state = state << 16 | int.from_bytes(self.piece[self.front : self.front + 2], "little")
            self.front += 2
        self.states[lane] = state
        if symbol == 256:
            self.back -= 1
            symbol = self.piece[self.back]
        assert self.front <= self.back
        return symbol

    def end(self) -> None:
        assert self.piece[self.front : self.back] in (b"", b"\0")
        assert set(self.states) == {1 << 16}


def groups_of(bitstream: bytes, num_groups: int) -> list[bytes]:
    sizes = [2 * words for words in struct.unpack_from(f"<{num_groups}I", bitstream)]
    starts = [4 * num_groups]
    for size in sizes:
        starts.append(starts[-1] + size)
    assert starts[-1] <= len(bitstream)
    assert len(bitstream) % 2 == 0
    return [bitstream[start:end] for start, end in zip(starts, [*starts[1:], len(bitstream)], strict=True)]


def unans(
    bitstream: bytes, num_rows: int, num_tokens: int, tables: Mapping[str, np.ndarray] | None = None, delta: int = 17
) -> np.ndarray:
    tables = tables or np.load(TABLES)
    slots = tables["slots"].astype(int)

    def take(lanes: Lanes, lane: int, distribution: int, row: int, token: int) -> int:
        return lanes.take(lane, slots[distribution]) - 128

    return (rows_of(bitstream, num_rows, num_tokens, take, tables, delta) + 128).astype(np.uint8)


def unladder(bitstreams: Sequence[bytes], num_rows: int, num_tokens: int) -> np.ndarray:
    tables = np.load(TABLES)
    num_levels, kept, num_wide = struct.unpack_from("<BHH", bitstreams[0])
    wide = [struct.unpack_from("<HB", bitstreams[0], 5 + 3 * i) for i in range(num_wide)]
    far = [row for row, bits in wide if 2**bits > 3 ** (num_levels - 1)]
    coded = unans(bitstreams[0][5 + 3 * num_wide :], kept + len(far), num_tokens).astype(int) - 128
    found = coded[:kept]
    found[far] += 256 * coded[kept:]
    for bitstream in bitstreams[1:]:
        coarse = found

        def take(lanes: Lanes, lane: int, distribution: int, row: int, token: int) -> int:
            n = int(coarse[row, token])  # noqa: B023, used within the loop
            digit = lanes.take(lane, tables["digits"][distribution, min(abs(n), 3)].astype(int)) - 1
            return 3 * n + (digit if n >= 0 else -digit)

        found = rows_of(bitstream, kept, num_tokens, take, tables)
    found = found * 3 ** (num_levels - len(bitstreams))
    integers = np.zeros((num_rows, num_tokens), int)
    integers[:kept] = found.clip(-128, 127)
    for i, (row, bits) in enumerate(wide):
        high = ((found[row] + 2 ** (bits - 1)) // 2**bits).clip(-127, 127)
        integers[kept + i] = high
        integers[row] = (found[row] - high * 2**bits).clip(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (integers + 128).astype(np.uint8)


def rows_of(
    bitstream: bytes,
    num_rows: int,
    num_tokens: int,
    take: Callable[[Lanes, int, int, int, int], int],
    tables: Mapping[str, np.ndarray],
    delta: int = 17,
) -> np.ndarray:
    """``take`` returns the number n of a lane, with the number of its distribution, at a row and a token."""
    slots, gains = tables["slots"].astype(int), tables["gains"]
    groups = [range(first, min(first + 128, num_tokens)) for first in range(0, num_tokens, 128)]
    *pieces, coded = groups_of(bitstream, len(groups))
    classes = Lanes(coded, min(8, num_rows))
    kinds = [0]
    for number in range(num_rows):
        kinds.append((kinds[-1] + classes.take(number % 8, slots[delta]) - 128) % 64)
    classes.end()
    rows = np.zeros((num_rows, num_tokens), int)
    for tokens, piece in zip(groups, pieces, strict=True):
        lanes, energies = Lanes(piece, min(32, len(tokens))), dict.fromkeys(tokens, 1024)
        for number, (row, kind) in enumerate(zip(rows, kinds[1:], strict=True)):
            for t in tokens:
                level = (struct.unpack("<I", struct.pack("<f", energies[t]))[0] >> 21) - 532
                row[t] = take(lanes, t % 32, int(tables["choice"][kind, min(max(level, 0), 31)]), number, t)
                energies[t] += (min(abs(int(row[t])) * int(gains[kind]), 16384) >> 5) - (energies[t] >> 5)
        lanes.end()
    return rows


def integers_of(bitstream: bytes, codec: str, layout: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray:
    if codec == "raw":
        return np.frombuffer(bitstream, np.uint8).reshape(shape)
    width, height = layout["width"], layout["height"]
    if layout["type"] == "tiles":
        tile_h, tile_w = layout["head_rows"] * layout["dim_rows"], layout["head_cols"] * layout["dim_cols"]
        cols = width // tile_w
        num_frames = -(-shape[0] // (cols * (height // tile_h)))
        t, layer, h, d = np.ogrid[tuple(slice(n) for n in shape)]
        tile = t // num_frames
        y = tile // cols * tile_h + h // layout["head_cols"] * layout["dim_rows"] + d // layout["dim_cols"]
        x = tile % cols * tile_w + h % layout["head_cols"] * layout["dim_cols"] + d % layout["dim_cols"]
        place = (t % num_frames, layer, y, x)
    else:
        assert layout["type"] == "regions"
        rows, cols = layout["token_rows"], layout["token_cols"]
        a_row = width // cols
        regions = a_row * (height // rows)
        num_frames = -(-shape[0] // (3 * regions))
        c, t = np.ogrid[: shape[0], : shape[1]]
        region = c // 3 % regions
        place = (c // (3 * regions), c % 3, region // a_row * rows + t // cols, region % a_row * cols + t % cols)
    frames = frames_of(bitstream, codec, (num_frames, 3, height, width))
    found: np.ndarray = frames[place]
    return found


def frames_of(bitstream: bytes, codec: str, shape: tuple[int, int, int, int]) -> np.ndarray:
    match codec:
        case "zstd":
            return np.frombuffer(unzstd(bitstream), np.uint8).reshape(shape)
        case "deflate":
            return np.frombuffer(zlib.decompress(bitstream), np.uint8).reshape(shape)
        case "ans":
            return unans(bitstream, shape[0] * 3, shape[2] * shape[3]).reshape(shape)
        case "ans-tables":
            return unans_tables(bitstream, 3 * shape[2] * shape[3], shape[0]).T.reshape(shape)
    num_frames, _, height, width = shape
    (count,) = struct.unpack_from("<I", bitstream)
    sizes = struct.unpack_from(f"<{count}I", bitstream, 4)
    decoder = av.CodecContext.create("hevc", "r")
    assert isinstance(decoder, av.VideoCodecContext)
    pictures: list[av.VideoFrame] = []
    offset = 4 + 4 * count
    for size in sizes:
        assert bitstream[offset : offset + size].count(b"\0\0\1") <= 256
        pictures += decoder.decode(av.Packet(bitstream[offset : offset + size]))
        offset += size
    pictures += decoder.decode(None)
    assert offset == len(bitstream)
    planes = {"hevc": ("yuv444p", 3), "hevc420": ("yuv420p", 1)}[codec]
    assert {(p.format.name, p.width, p.height) for p in pictures} == {(planes[0], width, height)}
    found = np.stack([pixels(picture, plane) for picture in pictures for plane in range(planes[1])])
    if codec == "hevc":
        return found.reshape(shape)
    return found.reshape(3, num_frames, height, width).swapaxes(0, 1)


def pixels(picture: av.VideoFrame, index: int) -> np.ndarray:
    plane = picture.planes[index]
    return np.frombuffer(plane, np.uint8).reshape(-1, plane.line_size)[: plane.height, : plane.width]


# Values


def values_of(
    cell: Cell, space: dict[str, Any], parts: dict[str, np.ndarray], profile: Profile | None
) -> list[np.ndarray]:
    """The bits of K and of V, ``(tokens, layers, heads, dim)``."""
    name, dtype = space["quantiser"], space["kv_dtype"]
    if name == "exact":
        num_bytes = np.dtype(BIT_TYPES[dtype]).itemsize
        return [
            unrotated(np.stack([parts[f"{t} byte {i}"] for i in range(num_bytes)], axis=-1), dtype) for t in ("k", "v")
        ]
    if name.startswith("klt"):
        assert profile is not None
        return klt_values(cell, space, parts, profile)
    out = []
    for t, listed in re.findall(r"([kv])=([0-9,]+)", name):
        bins = [int(number) for number in listed.split(",")]
        centres = np.array([bins[min(layer, len(bins) - 1)] // 2 - 1 for layer in cell.layers])
        scales = bfloat16(parts[f"{t} scales"]).reshape(len(cell.tokens), len(cell.layers), -1, 1)
        assert np.isfinite(scales).all()
        out.append(rounded((parts[t].astype(float) - centres[:, None, None]) * scales, dtype))
    return out


def unrotated(planes: np.ndarray, dtype: str) -> np.ndarray:
    """Values from their bytes, least significant first along the last axis; their bits were rotated left by one."""
    kind = np.dtype(BIT_TYPES[dtype])
    bits = np.ascontiguousarray(planes).view(kind)[..., 0]
    top = 8 * kind.itemsize - 1
    return ((bits >> kind.type(1)) | (bits << kind.type(top))).astype(kind)


def klt_values(cell: Cell, space: dict[str, Any], parts: dict[str, np.ndarray], profile: Profile) -> list[np.ndarray]:
    match = re.fullmatch(r"klt\(profile=([0-9a-f]{32});step=(.*)\)", space["quantiser"])
    assert match is not None
    assert match[1] == profile.digest
    step = float(match[2])
    exponents, coefficients = parts["exponents"], parts["coefficients"]
    usual, largest = profile.tensors[f"{cell.profile_cell}.reach"] / np.float32(step)
    kept = max(1, int((usual > 0.5).sum()))
    bits = np.ceil(np.log2(largest[:kept] / np.float32(127)))
    wide = np.flatnonzero(bits > 0)
    inverse = profile.tensors[f"{cell.profile_cell}.inverse"].astype(float)
    matrix = np.concatenate((inverse[:kept], inverse[wide] * 2.0 ** np.minimum(bits[wide], 8)[:, None]))
    assert len(coefficients) == len(matrix) == cell.coefficients
    scales = 2.0 ** ((exponents.astype(float) - 128) / 2) * step
    x = ((coefficients.T.astype(float) - 128) @ matrix) * scales[:, None]
    x += profile.tensors[f"{cell.profile_cell}.mean"]
    shape, dims = (len(cell.layers), len(cell.heads)), (space["k_head_dim"], space["v_head_dim"])
    split = math.prod(shape) * dims[0]
    k = rotated(x[:, :split].reshape(-1, *shape, dims[0]), cell, profile)
    v = x[:, split:].reshape(-1, *shape, dims[1])
    largest = {"float16": 65504, "float8_e4m3fn": 448, "float8_e5m2": 57344}.get(space["kv_dtype"])
    if largest is not None:
        k, v = np.clip(k, -largest, largest), np.clip(v, -largest, largest)
    values = [rounded(t, space["kv_dtype"]) for t in (k, v)]
    is_exact = exponents == 0
    if is_exact.any():
        num_bytes = values[0].itemsize
        planes = parts["exact"].reshape(int(is_exact.sum()), num_bytes, x.shape[1]).swapaxes(1, 2)
        exact = unrotated(planes, space["kv_dtype"])
        values[0][is_exact] = exact[:, :split].reshape(-1, *shape, dims[0])
        values[1][is_exact] = exact[:, split:].reshape(-1, *shape, dims[1])
    return values


def rotated(k: np.ndarray, cell: Cell, profile: Profile) -> np.ndarray:
    out = k.copy()
    for index, layer in enumerate(cell.layers):
        rotation = profile.coded[layer]["rotation"]
        if rotation is not None:
            out[:, index] = turned(k[:, index], cell.tokens, profile.rotations[rotation])
    return out


def turned(k: np.ndarray, tokens: range, rope: dict[str, Any]) -> np.ndarray:
    positions = np.array(tokens, np.float32) / np.float32(rope["position_divisor"])
    angles = (positions[:, None] * np.array(rope["inv_freq"], np.float32)).astype(float)[:, None]
    cos, sin = (f(angles) * rope["attention_scaling"] for f in (np.cos, np.sin))
    half = len(rope["inv_freq"])
    first, second = slice(0, half), slice(half, 2 * half)
    if rope["interleaved"]:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    out = k.copy()
    out[..., first] = k[..., first] * cos - k[..., second] * sin
    out[..., second] = k[..., second] * cos + k[..., first] * sin
    return out


def bfloat16(raw: np.ndarray) -> np.ndarray:
    return (raw.view("<u2").astype("<u4") << 16).view("<f4").astype(float)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of the nearest values of ``dtype``, ties to even."""
    kind = BIT_TYPES[dtype]
    if dtype in ("float32", "float16"):
        with np.errstate(over="ignore"):  # to infinity
            return x.astype(dtype).view(kind)
    exponent_bits, mantissa_bits = {"bfloat16": (8, 7), "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}[dtype]
    bias = 2 ** (exponent_bits - 1) - 1
    exponent = np.maximum(np.frexp(x)[1] - 1, 1 - bias)
    steps = np.rint(np.ldexp(np.abs(x), mantissa_bits - exponent))  # in units of the last place
    carries = steps == 2 ** (mantissa_bits + 1)
    steps, exponent = np.where(carries, steps / 2, steps), exponent + carries
    is_normal = steps >= 2**mantissa_bits
    bits = np.where(is_normal, (exponent + bias - 1) * 2**mantissa_bits, 0) + steps.astype(int)
    most = 0x7E if dtype == "float8_e4m3fn" else (2**exponent_bits - 1) << mantissa_bits  # 448, or infinity
    bits = np.minimum(bits, most)
    return (bits + (np.signbit(x).astype(int) << (exponent_bits + mantissa_bits))).astype(kind)


# Profiles


@dataclass
class Profile:
    tensors: dict[str, np.ndarray]
    coded: list[dict[str, Any]]
    rotations: list[dict[str, Any]]
    digest: str

    @classmethod
    def parse(cls, raw: bytes) -> Profile:
        """From a safetensors file: u64 size of the header, the header as JSON, the tensors' bytes."""
        (size,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + size])
        about = json.loads(header.pop("__metadata__")["kvfetch"])
        assert about["version"] == 4
        layers = [{key: each[key] for key in ("pool", "window", "rotation")} for each in about["layers"]["layers"]]
        keys = ("inv_freq", "attention_scaling", "interleaved", "position_divisor")
        rotations = [{key: each[key] for key in keys} for each in about["layers"]["rotations"]]
        curve = [{key: each[key] for key in ("step", "kl", "bits_per_value")} for each in about["curve"]]
        of_kinds = ("name", "num_windows", "num_held_out", "counts", "context_kl", "kls")
        kinds = [{key: each[key] for key in of_kinds} for each in about["kinds"]]
        layer_map = {"layers": layers, "rotations": rotations}
        described = [4, layer_map, about["num_sinks"], curve, about["context_kl"], kinds]
        whole = xxhash.xxh3_128(json_text(described).encode())
        coded = [each for each in layers if each["pool"] == "kv"]
        tensors = {}
        for group in range(-(-len(coded) // about["cell_layers"])):
            for block in range(about["num_heads"] // about["cell_heads"]):
                for field in ("inverse", "k_weight", "v_weight", "mean", "spread", "reach", "sensitivity"):
                    name = f"{group}.{block}.{field}"
                    start, end = (8 + size + place for place in header[name]["data_offsets"])
                    shape = tuple(header[name]["shape"])
                    whole.update(f"{name} {shape}".encode() + raw[start:end])
                    flat = np.frombuffer(raw[start:end], np.uint8)
                    kind = header[name]["dtype"]
                    assert kind == ("BF16" if field == "inverse" else "F32")
                    tensors[name] = (bfloat16(flat) if kind == "BF16" else flat.view("<f4")).reshape(shape)
        return cls(tensors, coded, rotations, whole.hexdigest())


def json_text(value: Any) -> str:
    """JSON without spaces; numbers as the document says."""
    match value:
        case dict():
            return "{" + ",".join(f'"{key}":{json_text(each)}' for key, each in value.items()) + "}"
        case list():
            return "[" + ",".join(map(json_text, value)) + "]"
        case float():
            return float_text(value)
    return json.dumps(value, ensure_ascii=False)


def float_text(value: float) -> str:
    """The fewest digits that give the value back, with the point among them or near, or else with an exponent."""
    sign = "-" if value < 0 else ""
    mantissa, _, power = repr(abs(value)).partition("e")
    whole, _, part = mantissa.partition(".")
    digits = (whole + part).lstrip("0")
    leading = len(whole + part) - len(digits)
    point = len(whole) - leading + int(power or 0)  # the value is 0.digits * 10 ** point
    digits = digits.rstrip("0") or "0"
    if value == 0:
        return f"{sign}0.0"
    if len(digits) <= point <= 16:
        return f"{sign}{digits.ljust(point, '0')}.0"
    if 0 < point <= 16:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -5 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    tail = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{tail}e{point - 1}"
