"""What was written once must be readable for ever: segments and profiles lie in tests/golden."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from sgl_kvfetch import prompts
from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.protect import open_manifest
from sgl_kvfetch.codec.container.reader import SegmentReader, cell_place
from sgl_kvfetch.codec.container.segment import CodedSegment
from sgl_kvfetch.codec.fingerprint import fingerprint_model
from sgl_kvfetch.codec.quant.base import CellPlace, CellValues, Quantised
from sgl_kvfetch.codec.quant.klt import _MATRIX_ERROR, ZERO, KltQuantiser, scales_of
from sgl_kvfetch.codec.quant.rope import rotate
from sgl_kvfetch.keys import Labels
from tests.codec.container.plain import cells_of, same
from tests.codec.quant.profiles import PRODUCTS, products
from tests.golden.make import (
    CASES,
    ENCRYPTED,
    ENCRYPTED_LEVELS,
    KEY,
    LEVELS,
    NUM_LEVELS,
    NUM_PAGES,
    Case,
    golden_quantiser,
    restored,
    stored_objects,
)
from tests.golden.second_reader import (
    decrypted,
    fingerprint_of,
    float_text,
    hashes_of,
    labels_of,
    names_of,
    parse_manifest,
    read_values,
)
from tests.segments import page_hashes

EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
EVERY_VARIANT = pytest.mark.parametrize(
    ("case", "variant"),
    [(case, variant) for case in CASES.values() for variant in range(len(case.variants))],
    ids=lambda x: x.stem if isinstance(x, Case) else str(x),
)


def manifest_of(case: Case) -> Manifest:
    return decode_manifest(case.path("kvm").read_bytes())


@EVERY_CASE
def test_golden_manifests_are_what_they_were(case: Case) -> None:
    """Digests and names are part of the format: other writers and stores go by them. Labels are no part of names."""
    raw = case.path("kvm").read_bytes()
    manifest, body = decode_manifest(raw), parse_manifest(raw)
    assert manifest.encode() == raw
    assert manifest.heads == case.head_slice
    assert manifest.first_page == case.first_page
    assert list(manifest.page_hashes) == page_hashes(NUM_PAGES, "", case.first_page)
    assert [(v.codec, v.resolution) for v in manifest.variants] == list(case.variants)
    for variant, target in zip(manifest.variants, case.variants, strict=True):
        assert target.codec in {chunk.codec.removesuffix("-tables") for chunk in variant.chunks}
    assert names_of(body) == [manifest.key.manifest_name, *map(manifest.data_name, manifest.variants)]
    assert labels_of(body) == (manifest.labels.model, manifest.labels.quantiser)
    assert manifest.labels == case.labels
    unlabelled = msgspec.structs.replace(manifest, labels=Labels())
    assert unlabelled.key == manifest.key
    decode_manifest(unlabelled.encode()).heads.require_same(manifest.heads)


@EVERY_VARIANT
def test_golden_segments_read_as_on_the_day_they_were_written(case: Case, variant: int) -> None:
    """Also bit for bit by a reader that was written from docs/format.md alone."""
    profile = None if case.profile is None else case.profile.read_bytes()
    found = read_values(case.path("kvm").read_bytes(), case.data(variant), variant, profile)
    assert found == case.path("values").read_bytes()
    manifest, quantiser = manifest_of(case), golden_quantiser(case.quantiser)
    reader = SegmentReader(manifest, quantiser, variant)
    expected = torch.frombuffer(bytearray(found), dtype=manifest.geometry.torch_dtype)
    if isinstance(quantiser, KltQuantiser):
        assert_nearly(reader, [case.data(variant)], expected)
    else:
        values = restored(reader, case.data(variant))
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))


def assert_nearly(reader: SegmentReader, objects: Sequence[bytes], expected: torch.Tensor) -> None:
    """Compare with values that other sums may have: of this CPU, in float32, and in bfloat16 as the worst CPU's."""
    assert isinstance(reader.quantiser, KltQuantiser)
    info = torch.finfo(expected.dtype)
    for how in PRODUCTS:
        with products(how):
            quantiser = KltQuantiser(reader.quantiser.profile, step=reader.quantiser.step)
            rest = expected.double()
            for cell in reader.manifest.cells():
                quantised = reader.decode_cell(cell, reader.chunks_in(cell, objects))
                place = cell_place(reader.manifest, cell)
                values = quantiser.dequantise(quantised, expected.dtype, place)
                for found, error in zip(values, most_errors(quantiser, quantised, place), strict=True):
                    there, rest = rest[: found.numel()].view(found.shape), rest[found.numel() :]
                    rounding = info.eps * there.abs().clamp_min(info.smallest_normal) + 1e-5
                    assert ((found.double() - there).abs() <= error + rounding).all()
        assert not len(rest)


def most_errors(quantiser: KltQuantiser, quantised: Quantised, place: CellPlace) -> CellValues:
    """Return by how much a CPU may restore other values of a cell's integers, float64, before they are rounded.

    A product in bfloat16 is rounded once, before the rotation, to a neighbour: that is a unit of its last place. Its
    sums in float32 are off by a unit for each term at most. A matrix of int16 is rounded (`IntegerMatrix`): six
    deviations are allowed. A rotation spreads the errors of two channels over both.
    """
    exponents, _, integers = quantised
    profile, inverse = quantiser.profile, quantiser.inverse_of(place)
    scales = scales_of(exponents)[:, None].double() * quantiser.step
    n, matrix = integers.T.double() - ZERO, inverse.matrix.double()
    kept = min(len(matrix), len(inverse.mean))
    off = (n @ matrix * scales).abs() * torch.finfo(torch.bfloat16).eps
    off += n.abs() @ matrix.abs() * scales * len(matrix) * 2.0**-24
    off += 6 * _MATRIX_ERROR * matrix[:kept].norm(dim=0) / 12**0.5 * scales
    errors = CellValues(*quantiser._split(off, place))
    for index, layer in enumerate(place.layers):
        rope = profile.layers.rope_of(profile.layers.coded[layer])
        if rope is not None:
            # Sums of magnitudes: the first channels' by the one, the second ones' by the other.
            cos, sin = rope.table(place.tokens.start, len(place.tokens)).double().abs().chunk(2, 1)
            of_signs = (rotate(errors.k[:, index], torch.cat((cos, sign * sin), 1), rope) for sign in (1, -1))
            errors.k[:, index] = torch.maximum(*(x.abs() for x in of_signs))
    return errors


def test_the_document_suffices_to_find_ones_own_folder(tmp_path: Path) -> None:
    tokens = list(range(3, 70_000, 1009))
    for salt in ("", "tenant é"):
        assert hashes_of(tokens, 16, salt) == prompts.page_hashes(tokens, 16, salt or None)
    for name in ("b.safetensors", "a/x.py", "a-b.gguf", "config.json", "readme.md", ".git/x.bin", "empty.bin"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"" if name == "empty.bin" else name.encode())
    assert fingerprint_of(tmp_path) == fingerprint_model(str(tmp_path))


def test_golden_encrypted_segments_decrypt() -> None:
    """By our reader, and by the document's."""
    raw, objects = ENCRYPTED.read_bytes(), stored_objects(ENCRYPTED)
    stored, plain = decode_manifest(raw), manifest_of(CASES["exact-hevc"])
    assert stored.encode() == raw
    opened = open_manifest(stored, StoreKeys(KEY))
    values = restored(SegmentReader(opened, golden_quantiser("exact")), objects[0])
    expected = CASES["exact-hevc"].path("values").read_bytes()
    assert values.view(torch.uint8).numpy().tobytes() == expected
    assert opened.variants[0].contents == plain.variants[0].contents
    body, (data,) = decrypted(raw, objects, KEY)
    assert read_values(body, data) == expected


def test_encrypted_levels_are_those_of_the_golden_segment() -> None:
    """By our reader, and by the document's."""
    plain, objects = decode_manifest(LEVELS.read_bytes()), stored_objects(LEVELS)
    raw, stored = ENCRYPTED_LEVELS.read_bytes(), stored_objects(ENCRYPTED_LEVELS)
    assert len(stored) == NUM_LEVELS
    assert decode_manifest(raw).encode() == raw
    quantiser = golden_quantiser(CASES["klt-ans"].quantiser)
    found = cells_of(CodedSegment.of(decode_manifest(raw), stored), quantiser, keys=StoreKeys(KEY))
    assert same(found, cells_of(CodedSegment.of(plain, objects), quantiser))
    opened, contents = decrypted(raw, stored, KEY)
    assert (decode_manifest(opened), contents) == (plain, objects)


@pytest.mark.slow
@pytest.mark.parametrize("num_levels", range(1, NUM_LEVELS + 1))
def test_golden_levels_read_alike(num_levels: int) -> None:
    """By the document's reader, too; all levels give the values of the case that has none."""
    case, raw = CASES["klt-ans"], LEVELS.read_bytes()
    objects = stored_objects(LEVELS)[:num_levels]
    manifest, quantiser = decode_manifest(raw), golden_quantiser(case.quantiser)
    assert manifest.encode() == raw
    assert case.profile is not None
    found = read_values(raw, objects[0], 0, case.profile.read_bytes(), objects[1:])
    assert (found == case.path("values").read_bytes()) == (num_levels == NUM_LEVELS)
    reader = SegmentReader(manifest, quantiser, num_levels=num_levels)
    assert_nearly(reader, objects, torch.frombuffer(bytearray(found), dtype=torch.bfloat16))


def test_numbers_in_a_profiles_digest() -> None:
    plain = ("0.0", "-1.0", "0.1", "-0.00125", "123456.789", "0.10000000149011612", "0.00001", "0.00002499999936844688")
    for text in (*plain, "1000000000000000.0", "1e-6", "2.5e-7", "5e-324", "1e16", "1.25e17"):
        assert float_text(float(text)) == text
        assert msgspec.json.encode(float(text)).decode() == text
