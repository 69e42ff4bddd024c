"""A store, a codec and a quantiser of one's own. pyproject.toml has their entry points, by which they are found:

    pip install ./examples/extension

Then ``memory://shelf`` is a store, "codec": "lzma" a codec, and "quantiser": "float8" or "float8(e5m2)" a quantiser.
"""

from __future__ import annotations

import lzma
import time
from collections.abc import AsyncIterator, Sequence

import numpy as np
import torch

from sgl_kvfetch.codec import CellPlace, CellValues, Codec, Content, Part, Quantised, Quantiser, bytes_of
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError, QuantiseError, StoreError
from sgl_kvfetch.stores import AdminStore, HttpOptions, NoteKind, ObjectInfo, object_digest, require_name

_SHELVES: dict[str, dict[str, tuple[bytes, float]]] = {}  # by URL: content and time, by name


class MemoryStore(AdminStore):
    """A dictionary of this process. A real one would limit each request by `options.timeout_s`, and translate what goes
    wrong to StoreError. Pages are looked up by the names of segments, which is the default."""

    def __init__(self, url: str) -> None:
        self._content = _SHELVES.setdefault(url, {})

    async def get(self, name: str, start: int = 0, length: int | None = None) -> bytes | None:
        require_name(name)
        return self._range(name, start, length)

    def _range(self, name: str, start: int, length: int | None) -> bytes | None:
        if name not in self._content:
            return None
        whole = self._content[name][0]
        end = len(whole) if length is None else start + length
        if start > len(whole) or end > len(whole):
            raise StoreError("truncated", f"{name} has {len(whole)} bytes, expected {end}")
        return whole[start:end]

    async def put(self, name: str, data: Content) -> None:
        require_name(name)
        self._content[name] = bytes_of(data), time.time()

    async def replace(self, name: str, data: bytes, expected_digest: str) -> bool:
        found = await self.get(name)
        if found is not None and object_digest(found) == expected_digest:
            await self.put(name, data)
            return True
        return found == data

    async def delete(self, name: str) -> bool:
        require_name(name)
        return self._content.pop(name, None) is not None

    async def head(self, name: str) -> ObjectInfo | None:
        require_name(name)
        return self._info(name) if name in self._content else None

    def _info(self, name: str, start: int = 0) -> ObjectInfo:
        whole, put_s = self._content[name]
        return ObjectInfo(name[start:], len(whole), put_s)

    async def list(self, prefix: str = "") -> AsyncIterator[ObjectInfo]:
        for name in tuple(self._content):
            if name.startswith(prefix) and not name.startswith(".") and name in self._content:
                yield self._info(name)

    async def notes(self, kind: NoteKind) -> Sequence[ObjectInfo]:
        folder = f".{kind.name}/"
        return [self._info(name, len(folder)) for name in self._content if name.startswith(folder)]

    async def get_note(self, kind: NoteKind, name: str, length: int | None = None) -> bytes | None:
        return self._range(f".{kind.name}/{kind.require(name, length)}", 0, length)

    async def put_note(self, kind: NoteKind, name: str, data: bytes) -> None:
        self._content[f".{kind.name}/{kind.require(name)}"] = data, time.time()

    async def delete_note(self, kind: NoteKind, name: str) -> bool:
        return self._content.pop(f".{kind.name}/{kind.require(name)}", None) is not None

    async def close(self) -> None:
        """What it holds stays, as in a store elsewhere."""


def open_memory(url: str, token: str | None, options: HttpOptions) -> MemoryStore:
    return MemoryStore(url)


class LzmaCodec(Codec):
    """Smaller than deflate, and far slower. lzma releases the interpreter's lock."""

    name = "lzma"
    decode_cost = 6
    is_flat = True

    def encode(self, frames: torch.Tensor) -> bytes:
        return lzma.compress(frames.contiguous().numpy().tobytes(), preset=1)

    def decode(self, bitstream: bytes | memoryview, shape: tuple[int, int, int]) -> torch.Tensor:
        num_frames, height, width = shape
        expected = num_frames * 3 * height * width
        try:  # never more memory than was announced, whatever the bytes say
            decompressor = lzma.LZMADecompressor(memlimit=64 << 20)
            data = decompressor.decompress(bytes(bitstream), expected + 1)
        except lzma.LZMAError as e:
            raise CorruptError(f"lzma bitstream does not decode: {e}") from e
        if len(data) != expected or not decompressor.eof or decompressor.unused_data:
            raise CorruptError(f"lzma bitstream decodes to {len(data)} bytes, expected {expected} and its end")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(num_frames, 3, height, width)


lzma_codec = LzmaCodec()
_FORMS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Float8(Quantiser):
    """A byte a value: its rounding to 8-bit floating point, e4m3 or e5m2. The form is a part of the identity: servers
    that differ in it have different namespaces, so neither takes the other's bytes for its own."""

    def __init__(self, identity: str) -> None:
        """``identity``: what a namespace has, or the name alone, as in a config. Others may have written it."""
        form = identity.removeprefix("float8").strip("()") or "e4m3"
        if form not in _FORMS:
            raise ConfigError(f"float8 has the forms {', '.join(_FORMS)}, not {form[:20]!r}")
        self.identity = f"float8({form})"
        self._dtype = _FORMS[form]

    def parts(self, dtype: torch.dtype) -> tuple[Part, ...]:
        """Return two parts of plain bytes, token after token."""
        return Part("k bytes"), Part("v bytes")

    def quantise(self, values: CellValues, place: CellPlace) -> Quantised:
        most = torch.finfo(self._dtype).max
        if not all(bool(x.isfinite().all()) for x in values):
            raise QuantiseError("values are not finite")
        return tuple(x.clamp(-most, most).to(self._dtype).contiguous().view(torch.uint8).flatten() for x in values)

    def dequantise(
        self, quantised: Quantised, dtype: torch.dtype, place: CellPlace, tokens: slice = slice(None)
    ) -> CellValues:
        shape = len(place.tokens), len(place.layers), len(place.heads), -1
        return CellValues(*(x.view(self._dtype).view(shape)[tokens].to(dtype) for x in quantised))

    def require_sound(self, plain: Sequence[np.ndarray], shape: tuple[int, int, int], token_bytes: int) -> None:
        found, in_bytes = sum(data.size for data in plain), shape[0] * token_bytes
        if found not in (in_bytes // 2, in_bytes // 4):  # of values of two bytes, or of four
            raise FormatError(f"{found} bytes of float8, for values of {in_bytes} bytes")
