"""K and V of a prompt as one byte string, and back: the codec for a person with tensors, without SGLang or a store.

The bytes are a manifest and a data object (docs/format.md), behind a header with the length of the prompt and of the
manifest. `docs/library.md` shows it, and measures it on a model.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from sgl_kvfetch.codec.bitstream.registry import resolution_for
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellValues, ExactQuantiser, Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import Profile
from sgl_kvfetch.codec.quant.registry import quantiser_from_identity
from sgl_kvfetch.errors import ConfigError, FormatError
from sgl_kvfetch.keys import PAGE_HASH_BYTES, HeadSlice, Namespace
from sgl_kvfetch.types import TENSORS, dtype_name

_HEADER = struct.Struct("<4sII")  # magic, tokens, bytes of the manifest
_MAGIC = b"KVFT"
_CODEC = "ans"
_SPAN_TOKENS = 1024  # at most, of a chunk


@dataclass(frozen=True, slots=True)
class Compressed:
    """A prompt's K and V as bytes. ``num_values``: of K and V together. ``kl``: what restoring them costs the next
    tokens' predictions, in nats per token, as calibration measured it at this step on its own text; 0 for ``exact``."""

    data: bytes
    num_values: int
    kl: float

    @property
    def bits_per_value(self) -> float:
        return 8 * len(self.data) / self.num_values


def compress(
    k: torch.Tensor, v: torch.Tensor, profile: Profile | None = None, target_kl: float | None = None
) -> Compressed:
    """Compress K and V of a prompt from its first token on, each ``(tokens, layers, heads, dim)``, as attention sees
    them: K is rotated.

    With a ``profile`` of the model, by ``klt`` with an expected divergence of ``target_kl`` nats per token (the
    profile's default without); without one, by ``exact``, which loses nothing. Raises ConfigError for tensors that do
    not belong together or to the profile, and for a target outside of what the profile has measured.
    """
    if k.dim() != 4 or k.shape[:3] != v.shape[:3] or v.dim() != 4 or k.dtype != v.dtype or not k.numel():
        raise ConfigError(
            f"k is {tuple(k.shape)} of {k.dtype} and v {tuple(v.shape)} of {v.dtype}: both must be "
            "(tokens, layers, heads, dim), equal but for dim, and have a token"
        )
    quantiser, kl = _quantiser(k, v, profile, target_kl)
    num_tokens, num_layers, num_heads, k_head_dim = k.shape
    # A segment has a power of two of pages. What the last one lacks, copies of the last token fill: fewer than pages.
    num_pages = 1 << max(0, (-(-num_tokens // _SPAN_TOKENS) - 1).bit_length())
    page_size = -(-num_tokens // num_pages)
    namespace = Namespace(
        model="" if profile is None else profile.calibration.weights,
        model_dtype="",
        attention="mha",
        kv_dtype=dtype_name(k.dtype),
        page_size=page_size,
        num_layers=num_layers,
        first_layer=0,
        num_heads=num_heads,
        k_head_dim=k_head_dim,
        v_head_dim=v.shape[3],
        quantiser=quantiser.identity,
    )
    heads = HeadSlice(namespace, range(num_heads))
    spec = SegmentSpec(heads, quantiser, _CODEC, resolution_for(_CODEC, "240p"), span_pages=1)
    filled = {t: _filled(x, num_pages * page_size) for t, x in zip(TENSORS, (k, v), strict=True)}
    hashes = [page.to_bytes(PAGE_HASH_BYTES, "big") for page in range(num_pages)]
    segment = encode_segment(spec, filled, 0, None, hashes)
    manifest = segment.manifest.encode()
    data = b"".join((_HEADER.pack(_MAGIC, num_tokens, len(manifest)), manifest, segment.data))
    return Compressed(data, k.numel() + v.numel(), kl)


def decompress(data: bytes, profile: Profile | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V, each ``(tokens, layers, heads, dim)``, of what `compress` has returned. ``profile``: the one that
    compressed them. Raises ConfigError for another one, and FormatError for bytes that are damaged."""
    if len(data) < _HEADER.size or data[:4] != _MAGIC:
        raise FormatError("these bytes are not what compress() returns: they do not begin with KVFT")
    _, num_tokens, manifest_bytes = _HEADER.unpack_from(data)
    stored = memoryview(data)[_HEADER.size :]
    manifest = decode_manifest(bytes(stored[:manifest_bytes]))
    stored = stored[manifest_bytes:]
    geometry = manifest.geometry
    most = len(manifest.page_hashes) * geometry.page_size
    if len(manifest.data) != 1 or not 1 <= num_tokens <= most:
        raise FormatError(f"these bytes say {num_tokens} tokens in {most} places: they are damaged")
    reader = SegmentReader(manifest, _reading(manifest, profile))
    if len(stored) < (expected := manifest.data[0].size_bytes):
        raise FormatError(f"these bytes end after {len(data)}, {expected - len(stored)} too early: they are cut off")
    shape = most, geometry.num_layers, geometry.num_heads
    dims = geometry.k_head_dim, geometry.v_head_dim
    out = CellValues(*(torch.empty(*shape, dim, dtype=geometry.torch_dtype) for dim in dims))
    for span in range(len(manifest.page_hashes) // manifest.span_pages):
        tokens = slice(*(page * geometry.page_size for page in manifest.span_range(span)))
        for cell in reader.span_cells(span):
            quantised = reader.decode_cell(cell, reader.chunks_in(cell, [stored]))
            into = out.tokens(tokens).cell(manifest.grid.layers(cell.layer_group), reader.heads_of(cell))
            for part, restored in zip(into, reader.dequantise_cell(cell, quantised), strict=True):
                part.copy_(restored)
    return out.k[:num_tokens], out.v[:num_tokens]


def _quantiser(
    k: torch.Tensor, v: torch.Tensor, profile: Profile | None, target_kl: float | None
) -> tuple[Quantiser, float]:
    """Return the quantiser and the divergence to expect of it."""
    if profile is None:
        if target_kl is not None:
            raise ConfigError(f"target_kl = {target_kl:g} needs a profile; without one, nothing is lost")
        return ExactQuantiser(), 0.0
    grid = profile.grid
    found, expected = (k.shape[1], k.shape[2]), (grid.num_layers, grid.num_heads)
    dims = profile.k_head_dim, profile.v_head_dim
    if found != expected or (k.shape[3], v.shape[3]) != dims:
        raise ConfigError(
            f"k and v have {found[0]} layers of {found[1]} heads of {k.shape[3]} and {v.shape[3]} channels, the "
            f"profile {expected[0]} of {expected[1]} of {dims[0]} and {dims[1]}"
        )
    quantiser = KltQuantiser(profile, target_kl)
    return quantiser, profile.kl_of(quantiser.step)


def _reading(manifest: Manifest, profile: Profile | None) -> Quantiser:
    identity = manifest.namespace.quantiser
    if not identity.startswith("klt("):
        return quantiser_from_identity(identity)
    step = identity.rpartition("step=")[2].rstrip(")")
    if profile is None or f"profile={profile.digest};" not in identity:
        given = "no profile was given" if profile is None else f"the profile given is {profile.digest}"
        raise ConfigError(f"these bytes were made by {identity}, and {given}")
    return KltQuantiser(profile, step=float(step))


def _filled(x: torch.Tensor, num_tokens: int) -> torch.Tensor:
    missing = num_tokens - len(x)
    return torch.cat([x, x[-1:].expand(missing, -1, -1, -1)]) if missing else x
