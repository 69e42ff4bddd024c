from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from sgl_kvfetch.codec.container.encryption import ENCRYPTED, NO_KEYS, StoreKeys
from sgl_kvfetch.codec.container.manifest import decode_manifest, encryption_keys_of
from sgl_kvfetch.codec.container.protect import open_manifest, secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.sides import encode_side
from sgl_kvfetch.codec.layout.frames import TileLayout
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.errors import ConfigError, CorruptError, EncryptedError, FormatError
from sgl_kvfetch.tools.encoder import make_targets, transcode
from tests.codec.container.plain import cells_of, same, side_pages
from tests.segments import make_segment, with_side

OLD, NEW = StoreKeys(b"o" * 32), StoreKeys(b"n" * 32, b"o" * 32)
KEYS = StoreKeys(b"k" * 32)
(KEY,) = KEYS.ids
SIDES = {("swa", 2): torch.arange(100, dtype=torch.uint8), ("mamba", 3): torch.ones(300, dtype=torch.uint8)}
PLAIN = with_side(make_segment(codec="hevc")[0], *encode_side(SIDES))
SEGMENT = secure_segment(PLAIN, KEYS)


def test_a_store_reads_names_and_sizes_and_nothing_of_content() -> None:
    stored, plain = decode_manifest(SEGMENT.manifest.encode()), PLAIN.manifest
    assert (stored.key, stored.page_hashes, stored.raw_bytes) == (plain.key, plain.page_hashes, plain.raw_bytes)
    assert encryption_keys_of(SEGMENT.manifest.encode()) == {KEY}
    for rows, before in zip(stored.data, plain.data, strict=True):
        assert {chunk.codec for chunk in rows.chunks} == {ENCRYPTED}
        assert {chunk.decoded_checksum for chunk in rows.chunks} == {bytes(16)}
        sizes = [chunk.size_bytes for chunk in before.chunks]
        assert [chunk.size_bytes for chunk in rows.chunks] == [size + 16 for size in sizes]
    known = [chunk.decoded_checksum for rows in plain.data for chunk in rows.chunks]
    known += [PLAIN.data[i : i + 16] for i in range(0, len(PLAIN.data) - 16, 101)]
    everything = SEGMENT.manifest.encode() + SEGMENT.data + b"".join(SEGMENT.side_data)
    assert not any(piece in everything for piece in known)


def test_no_object_is_encrypted_as_another() -> None:
    """Keys derive from 32 random bytes: a nonce would repeat only if these did."""
    again = secure_segment(PLAIN, KEYS)
    salts = {rows.encryption.salt for m in (SEGMENT.manifest, again.manifest) for rows in m.data if rows.encryption}
    assert len(salts) == 4
    assert again.data != SEGMENT.data


def test_variants_with_identical_data_share_an_object() -> None:
    made = transcode(PLAIN.manifest, PLAIN.data, make_targets(["hevc", "zstd"], ["240p", "480p"]))
    stored = secure_segment(made, KEYS)
    assert len(dict(stored.data_objects())) == len(dict(made.data_objects())) < 4
    for variant in range(4):
        assert same(cells_of(stored, keys=KEYS, variant=variant), cells_of(made, variant=variant))


def test_a_missing_key_is_named() -> None:
    for keys in (NO_KEYS, OLD):
        with pytest.raises(EncryptedError, match=f"encrypted with the key {KEY}, which this reader does not have"):
            open_manifest(SEGMENT.manifest, keys)
    with pytest.raises(EncryptedError, match=KEY):
        SegmentReader(SEGMENT.manifest, make_quantiser("exact"))


def test_values_and_side_pages_come_back_while_keys_are_replaced_one_after_another() -> None:
    stored = secure_segment(PLAIN, OLD)
    assert same(cells_of(stored, keys=NEW), cells_of(PLAIN))
    assert side_pages(stored, NEW) == {key: x.numpy().tobytes() for key, x in SIDES.items()}
    fresh = secure_segment(PLAIN, NEW)
    assert fresh.manifest.key_ids == NEW.ids[:1]
    with pytest.raises(EncryptedError, match=NEW.ids[0]):
        cells_of(fresh, keys=OLD)


def test_swapped_chunks_do_not_decrypt() -> None:
    """Even if the store makes all checksums fit."""
    (variant,) = SEGMENT.manifest.variants
    first, second, *rest = variant.chunks
    sizes = first.size_bytes, second.size_bytes
    data = SEGMENT.data
    swapped = data[sizes[0] : sum(sizes)] + data[: sizes[0]] + data[sum(sizes) :]
    variants = (msgspec.structs.replace(variant, chunks=(second, first, *rest)),)
    manifest = msgspec.structs.replace(SEGMENT.manifest, variants=variants)
    with pytest.raises(CorruptError, match="does not decrypt"):
        cells_of(replace(SEGMENT, manifest=manifest, data=swapped), keys=KEYS)


def test_a_segment_and_its_objects_decrypt_in_their_places_alone() -> None:
    manifest, other = SEGMENT.manifest, secure_segment(make_segment(seed="other")[0], KEYS)
    (variant,), (side,) = manifest.variants, manifest.sides
    layout = variant.layouts["k"]
    assert isinstance(layout, TileLayout)
    turned = msgspec.structs.replace(layout, dim_rows=layout.dim_cols, dim_cols=layout.dim_rows)
    moved_pages = tuple(msgspec.structs.replace(page, page=0) for page in side.pages)
    moves: tuple[dict[str, object], ...] = (
        {"page_hashes": (bytes(32), *manifest.page_hashes[1:])},
        {"first_page": 4, "previous_hash": bytes(32)},
        {"namespace": replace(manifest.namespace, model="another")},
        {"span_pages": 3},
        {"expires": 1 << 35},
        {"variants": (msgspec.structs.replace(variant, layouts=dict(variant.layouts) | {"k": turned}),)},
        {"variants": other.manifest.variants},
        {"sides": (msgspec.structs.replace(side, pages=moved_pages),)},
        {"sides": (msgspec.structs.replace(side, encryption=variant.encryption),)},
    )
    for move in moves:
        moved = msgspec.structs.replace(manifest, **move)
        with pytest.raises(CorruptError, match=f"does not decrypt with the key {KEY}"):
            open_manifest(decode_manifest(moved.encode()), KEYS)


def test_a_manifest_is_encrypted_as_a_whole() -> None:
    """A store cannot add an object of its own to an encrypted segment. An opened one is never stored."""
    with pytest.raises(AssertionError, match="not what is stored"):
        open_manifest(SEGMENT.manifest, KEYS).encode()
    mixed = msgspec.structs.replace(SEGMENT.manifest, sides=PLAIN.manifest.sides)
    with pytest.raises(FormatError, match="encrypted objects and others"):
        decode_manifest(mixed.encode())
    assert encryption_keys_of(mixed.encode()) == set()


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{b'n'.hex() * 32}\n\n{b'o'.hex() * 32}\n")
    assert StoreKeys.read(path).ids == NEW.ids
    for text, message in (
        ("\n", f"key file {path} is empty.*openssl rand -hex 32"),
        (f"{'00' * 32}\n{'0f' * 31}", "key 2 has 62 characters; expected 64 hex digits"),
        ("s3" * 32, "key 1 has 64 characters; expected 64 hex digits"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            StoreKeys.read(path)
        assert text[-8:] not in str(caught.value)
