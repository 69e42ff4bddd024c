"""Write golden segments again: ``python -m tests.golden.make [STEM...]``. Without stems, only missing ones are written:
only a new format version is a reason to write the others. Profiles are not made again."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from sgl_kvfetch.codec.container.encryption import StoreKeys
from sgl_kvfetch.codec.container.manifest import Manifest, decode_manifest
from sgl_kvfetch.codec.container.protect import secure_segment
from sgl_kvfetch.codec.container.reader import SegmentReader
from sgl_kvfetch.codec.container.segment import CodedSegment, SegmentSpec, encode_segment
from sgl_kvfetch.codec.quant.base import CellValues, Quantiser
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.codec.quant.registry import make_quantiser
from sgl_kvfetch.keys import HeadSlice, Labels
from sgl_kvfetch.tools.encoder import Target, transcode
from sgl_kvfetch.types import KVGeometry, TensorName
from tests.codec.quant.profiles import values_of
from tests.golden.second_reader import read_values
from tests.segments import make_heads, make_values, page_hashes

FOLDER = Path(__file__).parent
GEOMETRY = KVGeometry(num_layers=4, num_heads=2, k_head_dim=16, v_head_dim=8, page_size=16, dtype="bfloat16")
NUM_PAGES = 4
FIRST_PAGE = 8


@dataclass(frozen=True)
class Case:
    """A golden segment: STEM.kvm, STEM.VARIANT.kvd for each variant, and STEM.values: the bits of all cells' values in
    storage order, K before V."""

    stem: str
    quantiser: str
    variants: tuple[Target, ...]
    geometry: KVGeometry = GEOMETRY  # of the model
    heads: range = range(2)
    first_page: int = FIRST_PAGE
    first_layer: int = 0
    span_pages: int = 4
    labels: Labels = field(default=Labels())

    @property
    def profile(self) -> Path | None:
        path = FOLDER / f"{self.quantiser}.profile"
        return path if path.exists() else None

    @property
    def head_slice(self) -> HeadSlice:
        namespace = make_heads(self.geometry, golden_quantiser(self.quantiser)).namespace
        return HeadSlice(replace(namespace, first_layer=self.first_layer), self.heads, self.labels)

    def path(self, what: str) -> Path:
        return FOLDER / f"{self.stem}.{what}"

    def data(self, variant: int) -> bytes:
        return self.path(f"{variant}.kvd").read_bytes()


def plain(quantiser: str, codec: str, first_page: int = FIRST_PAGE) -> Case:
    return Case(f"{quantiser}-{codec}", quantiser, (Target(codec, "240p"),), first_page=first_page)


CASES = {
    case.stem: case
    for case in (
        plain("exact", "hevc"),
        plain("exact", "hevc420"),
        plain("exact", "deflate"),
        plain("uint8", "hevc"),
        plain("uint8", "zstd"),
        plain("cachegen", "hevc"),
        plain("klt", "hevc", first_page=0),  # with an exact token
        plain("klt", "zstd"),
        # Rows of 64 and of 16 tokens, with escapes and an exact token.
        Case("klt-ans", "klt", (Target("ans", "flat"), Target("hevc", "240p")), first_page=0),
        # Distributions in the bitstream.
        Case(
            "exact-ans", "exact", (Target("ans", "flat"),), replace(GEOMETRY, num_layers=3, page_size=64), span_pages=3
        ),
        # Some heads of a model; spans of three pages and one; pages that are no power of two; FP8.
        Case(
            "exact-fp8",
            "exact",
            (Target("zstd", "240p"), Target("hevc", "240p")),
            KVGeometry(num_layers=4, num_heads=8, k_head_dim=12, v_head_dim=10, page_size=5, dtype="float8_e4m3fn"),
            heads=range(2, 5),
            span_pages=3,
        ),
        # FP8, with an exact token and values that are cut.
        Case("klt-fp8", "klt", (Target("zstd", "240p"),), replace(GEOMETRY, dtype="float8_e4m3fn"), first_page=0),
        # FP8 with scales, in two resolutions that fill several frames.
        Case(
            "uint8-fp8",
            "uint8",
            (Target("hevc420", "240p"), Target("hevc", "480p")),
            KVGeometry(num_layers=3, num_heads=4, k_head_dim=64, v_head_dim=64, page_size=16, dtype="float8_e5m2"),
            heads=range(4),
        ),
        # The second of two pipeline stages, whose layers have other bins.
        Case(
            "cachegen-stage",
            "cachegen-bins",
            (Target("zstd", "240p"),),
            replace(GEOMETRY, page_size=8, dtype="float32"),
            first_layer=3,
            span_pages=3,
        ),
        # Names for people.
        Case(
            "exact-labels",
            "exact",
            (Target("zstd", "240p"),),
            replace(GEOMETRY, num_layers=2, page_size=4),
            labels=Labels("organisation/a model", "exact, for people"),
        ),
        # Some heads of a model; several head blocks and spans, the last of them short; a rotation of every kind.
        Case(
            "klt-heads",
            "klt-heads",
            (Target("hevc", "240p"), Target("deflate", "480p")),
            KVGeometry(num_layers=3, num_heads=6, k_head_dim=12, v_head_dim=8, page_size=20, dtype="float16"),
            heads=range(2, 6),
            span_pages=3,
        ),
    )
}


STEPS = {"klt": 2.0, "klt-heads": 1.75}  # coefficients of two integers, and some that are left out


@cache
def golden_quantiser(name: str) -> Quantiser:
    if name in STEPS:
        return KltQuantiser(load_profile(FOLDER / f"{name}.profile"), step=STEPS[name])
    if name == "cachegen-bins":
        return make_quantiser("cachegen", (256, 64, 64, 64, 32), (16, 15, 12, 10, 8, 4))
    return make_quantiser(name)  # type: ignore[arg-type]


def values_for(case: Case) -> dict[TensorName, torch.Tensor]:
    quantiser = golden_quantiser(case.quantiser)
    num_heads = len(case.heads)
    if case.stem != "klt-heads":
        geometry = replace(case.geometry, num_heads=num_heads)
        made = make_values(geometry, NUM_PAGES)
        if case.stem == "exact-ans":  # channels of many magnitudes, and noise
            random = torch.Generator().manual_seed(1)
            for x in made.values():
                x.normal_(generator=random).mul_(2.0 ** torch.arange(x.shape[3]))
        return made
    assert isinstance(quantiser, KltQuantiser)
    size = case.geometry.page_size
    values = values_of(quantiser.profile, NUM_PAGES * size, case.first_page * size)
    for token in (7, 70):  # they do not fit, and are kept exact: one in each span
        values.v[token] *= 1000
    k, v = (x[:, :, case.heads.start : case.heads.stop].half() for x in CellValues(*values))
    return {"k": k, "v": v}


def make(case: Case, num_levels: int = 1) -> CodedSegment:
    quantiser = golden_quantiser(case.quantiser)
    first, *more = case.variants if num_levels == 1 else case.variants[:1]
    spec = SegmentSpec(
        case.head_slice, quantiser, first.codec, first.resolution, case.span_pages, num_levels=num_levels
    )
    previous = page_hashes(1, "", case.first_page - 1)[0] if case.first_page else None
    hashes = page_hashes(NUM_PAGES, "", case.first_page)
    coded = encode_segment(spec, values_for(case), case.first_page, previous, hashes)
    return transcode(coded.manifest, coded.data, case.variants) if more else coded


def restored(reader: SegmentReader, data: bytes) -> torch.Tensor:
    """The values of all cells, K before V."""
    values: list[torch.Tensor] = []
    for cell in reader.manifest.cells():
        values += reader.dequantise_cell(cell, reader.decode_cell(cell, reader.chunks_in(cell, [data])))
    return torch.cat([x.flatten() for x in values])


def write(case: Case) -> None:
    coded = make(case)
    manifest: Manifest = coded.manifest
    case.path("kvm").write_bytes(manifest.encode())
    for variant in range(len(manifest.variants)):
        case.path(f"{variant}.kvd").write_bytes(coded.contents[variant])
    if case.profile is not None:  # sums of products, which every machine rounds differently
        bits = read_values(manifest.encode(), coded.data, 0, case.profile.read_bytes())
    else:
        values = restored(SegmentReader(manifest, golden_quantiser(case.quantiser)), coded.data)
        bits = values.view(torch.uint8).numpy().tobytes()
    case.path("values").write_bytes(bits)


KEY = bytes(range(32))
NUM_LEVELS = 3
ENCRYPTED, LEVELS, ENCRYPTED_LEVELS = (FOLDER / f"{n}.kvm" for n in ("encrypted", "klt-levels", "encrypted-levels"))


def stored_objects(path: Path) -> list[bytes]:
    """Return the data objects beside a manifest."""
    return [each.read_bytes() for each in sorted(FOLDER.glob(f"{path.stem}.*.kvd"))]


def encrypted(path: Path) -> CodedSegment:
    """Encrypt what lies there. Salts are random, so this is written once."""
    return secure_segment(CodedSegment.of(decode_manifest(path.read_bytes()), stored_objects(path)), StoreKeys(KEY))


MORE: dict[Path, Callable[[], CodedSegment]] = {
    LEVELS: lambda: make(CASES["klt-ans"], NUM_LEVELS),
    ENCRYPTED: lambda: encrypted(CASES["exact-hevc"].path("kvm")),
    ENCRYPTED_LEVELS: lambda: encrypted(LEVELS),
}


def main() -> None:
    for case in CASES.values():
        if case.stem in sys.argv[1:] or not (sys.argv[1:] or case.path("kvm").exists()):
            write(case)
    for path, coded in ((path, made()) for path, made in MORE.items() if not path.exists()):
        path.write_bytes(coded.manifest.encode())
        for number, data in enumerate(coded.contents):
            path.with_suffix(f".{number}.kvd").write_bytes(data)


if __name__ == "__main__":
    main()
