"""What installed packages bring by entry points, and how its faults are told. examples/extension is such a package."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import torch

from sgl_kvfetch import doors
from sgl_kvfetch.codec import SegmentReader, SegmentSpec, decode_manifest, quantiser_from_identity
from sgl_kvfetch.codec.bitstream import registry
from sgl_kvfetch.codec.bitstream.registry import get_codec
from sgl_kvfetch.codec.container.segment import encode_segment
from sgl_kvfetch.codec.quant.registry import make_brought
from sgl_kvfetch.directory import open_store
from sgl_kvfetch.errors import ConfigError, CorruptError, FormatError
from sgl_kvfetch.keys import HeadSlice
from sgl_kvfetch.plane.config import config_quantiser, parse_config
from sgl_kvfetch.plane.store import open_configured_store
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.hedged import HedgedStore
from sgl_kvfetch.testing import NAMESPACE, AdminStoreConformance, page_hashes
from tests.conftest import ROOT

EXAMPLE = ROOT / "examples" / "extension"
Points = dict[str, dict[str, str]]  # names and what they load, by group


def install(folder: Path, points: Points, package: str = "other", **modules: str) -> Path:
    """Install a package with these entry points and modules into a folder, as pip would."""
    info = folder / f"{package}-2.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 2.1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for name, text in modules.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def install_example(folder: Path) -> Path:
    points: Points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    return install(folder, points, kvfetch_example=(EXAMPLE / "kvfetch_example.py").read_text())


def forget() -> None:
    for each in (doors.brought_by_others, doors.load_brought, registry._brought, registry._loads):
        each.cache_clear()


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What is found is remembered: only a test looks again."""
    forget()
    yield monkeypatch
    forget()


@pytest.fixture
def example(tmp_path: Path, path: pytest.MonkeyPatch) -> Path:
    path.syspath_prepend(install_example(tmp_path))
    path.delitem(sys.modules, "kvfetch_example", raising=False)
    assert {point.name for point in entry_points(group="sgl_kvfetch.codecs")} == {"lzma"}
    return tmp_path


class TestStoreOfTheExample(AdminStoreConformance):
    checks_manifests = False
    finds_parts = False

    @pytest.fixture
    async def store(self, example: Path) -> AsyncIterator[Store]:
        store = open_store(f"memory:///{example}")
        yield store
        await store.close()


async def test_the_data_plane_hedges_reads_of_a_store_of_others(example: Path) -> None:
    config = parse_config({"store": "memory://shelf", "token": "t"}, {})
    store = open_configured_store(config)
    assert isinstance(store, HedgedStore)
    assert type(store._store).__name__ == "MemoryStore"
    await store.close()


@pytest.mark.process
def test_a_command_opens_a_store_of_others(example: Path) -> None:
    command = [sys.executable, "-m", "sgl_kvfetch.tools", "profile", "list", "memory://shelf", "--json"]
    done = subprocess.run(command, env={"PYTHONPATH": f"{example}:{ROOT}"}, capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout or "null")) == (0, []), done.stderr


@pytest.mark.parametrize(("quantiser", "codec"), [("exact", "lzma"), ("uint8", "lzma"), ("float8(e5m2)", "ans")])
def test_segments_of_others(example: Path, quantiser: str, codec: str) -> None:
    config = parse_config({"store": "memory://shelf", "quantiser": quantiser, "codec": codec}, {})
    made = config_quantiser(config)
    chain = page_hashes(8)
    heads = HeadSlice(replace(NAMESPACE, quantiser=made.identity), range(1))
    spec = SegmentSpec(heads, made, config.codec, registry.writers_resolution(codec, "240p"), 4)
    k = torch.randn((8, 1, 1, 48), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    segment = encode_segment(spec, {"k": k, "v": -k}, 0, None, list(chain))
    reader = SegmentReader(decode_manifest(segment.manifest.encode()), made)
    assert len(list(reader.ways(0))) == 1
    cells = [cell for span in range(2) for cell in reader.span_cells(span)]
    coded = [reader.decode_cell(cell, reader.chunks_in(cell, [segment.data])) for cell in cells]
    restored = torch.cat([reader.dequantise_cell(*each, slice(None)).k for each in zip(cells, coded, strict=True)])
    error = (restored.float() - k.float()).norm() / k.float().norm()
    assert error < {"exact": 1e-9, "uint8": 0.01}.get(quantiser, 0.1)


def test_parameters_of_a_quantiser_are_in_its_identity(example: Path) -> None:
    assert config_quantiser(parse_config({"store": "http://x", "quantiser": "float8"}, {})).identity == "float8(e4m3)"
    for identity in ("float8(e4m3)", "float8(e5m2)"):
        assert quantiser_from_identity(identity).identity == identity
    with pytest.raises(FormatError, match=r"asked for 'float8', it made 'float8\(e4m3\)'"):
        quantiser_from_identity("float8")
    with pytest.raises(FormatError, match=r"other 2\.1: float8 has the forms e4m3, e5m2, not 'e3m4'"):
        quantiser_from_identity("float8(e3m4)")


def test_damage_in_a_codec_of_others_is_noticed(example: Path) -> None:
    codec = get_codec("lzma")
    frames = torch.arange(24, dtype=torch.uint8).view(1, 3, 1, 8)
    bitstream = codec.encode(frames)
    assert torch.equal(codec.decode(bitstream, (1, 1, 8)), frames)
    for bad, shape in ((bitstream[:-9], (1, 1, 8)), (b"x", (1, 1, 8)), (bitstream, (1, 1, 7)), (bitstream, (2, 1, 8))):
        with pytest.raises(CorruptError):
            codec.decode(bad, shape)


def test_readers_without_a_codec_pass_its_variants_over(example: Path, path: pytest.MonkeyPatch) -> None:
    assert registry.can_decode({"lzma", "zstd", "ladder"})
    path.setattr(sys, "path", [each for each in sys.path if each != str(example)])
    forget()
    assert not registry.can_decode({"lzma", "zstd"})
    with pytest.raises(FormatError, match="codec 'lzma' is unknown; known are hevc, hevc420, ans"):
        get_codec("lzma")


def broken(tmp_path: Path, path: pytest.MonkeyPatch, group: str, value: str, text: str) -> None:
    install(tmp_path, {f"sgl_kvfetch.{group}": {"odd": f"odd_module:{value}"}}, odd_module=text)
    path.syspath_prepend(tmp_path)
    path.delitem(sys.modules, "odd_module", raising=False)


LABEL = r"entry point odd = odd_module:\w+ in sgl_kvfetch\.\w+, of other 2\.1"
STORE = "from sgl_kvfetch.stores import AdminStore\n"
CODEC = "from sgl_kvfetch.codec import Codec\nclass Mine(Codec):\n    decode_cost = 1\n"
WHOLE = f"{CODEC}    def encode(self, frames): ...\n    def decode(self, bitstream, shape): ...\n"
QUANTISER = "from sgl_kvfetch.codec import Quantiser\nclass Mine(Quantiser):\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import no_such_package", "cannot be imported: ModuleNotFoundError: No module named 'no_such_package'"),
        ("", "cannot be imported: AttributeError: module 'odd_module' has no attribute 'make'"),
        (
            "def make(url): ...",
            r"takes 1 positional argument but 3 were given; it is called with \(url, token, options",
        ),
        (
            f"{STORE}class S(AdminStore): ...\ndef make(*args): return S()",
            "abstract methods .*get_note.*, .*put_note",
        ),
        (
            "class S:\n    def get(self): ...\ndef make(*args): return S()",
            "expected a subclass of sgl_kvfetch.stores.base.AdminStore, found S. It lacks close, delete, delete_note, ",
        ),
    ],
)
def test_what_a_store_lacks(tmp_path: Path, path: pytest.MonkeyPatch, text: str, message: str) -> None:
    broken(tmp_path, path, "stores", "make", text)
    with pytest.raises(ConfigError, match=f"{LABEL}:? .*{message}"):
        open_store("odd://x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine = 5", r"expected a subclass of sgl_kvfetch\.codec\.bitstream\.base\.Codec, found int\. It lacks decode"),
        (f"{CODEC}mine = Mine()", "TypeError: Can't instantiate abstract class Mine .*decode.*, .*encode"),
        (f"{WHOLE}    name = 'even'\nmine = Mine()", "expected the codec's name 'odd', and no video; found 'even'"),
        (f"{WHOLE}    name, is_video = 'odd', True\nmine = Mine()", "found 'odd', a video codec"),
    ],
)
def test_what_a_codec_lacks(
    tmp_path: Path, path: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str, message: str
) -> None:
    broken(tmp_path, path, "codecs", "mine", text)
    with pytest.raises(ConfigError, match=f"codec = 'odd': .*{LABEL}.*{message}"):
        parse_config({"store": "http://x", "codec": "odd"}, {})
    assert not registry.can_decode({"odd"})
    assert "segments in this codec are passed over" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Mine = print", r"expected a subclass of .*Quantiser, found NoneType\. It lacks dequantise, parts, quantise"),
        (f"{QUANTISER}    def __init__(self, identity): ...", "Can't instantiate abstract class Mine .*dequantise"),
        (
            f"{QUANTISER}    parts = quantise = dequantise = 1\n    def __init__(self, identity): ...",
            r"expected an identity odd or odd\(PARAMETERS\), of at most 200 characters, found ''",
        ),
        (
            f"{QUANTISER}    parts = quantise = dequantise = 1\n    identity = 'exact'\n    def __init__(self, _): ...",
            r"found 'exact': namespaces are told apart by it",
        ),
    ],
)
def test_what_a_quantiser_lacks(tmp_path: Path, path: pytest.MonkeyPatch, text: str, message: str) -> None:
    broken(tmp_path, path, "quantisers", "Mine", text)
    with pytest.raises(ConfigError, match=f"{LABEL}.*{message}"):
        make_brought("odd")


def test_two_packages_with_one_name(tmp_path: Path, path: pytest.MonkeyPatch) -> None:
    for package in ("first", "second"):
        install(tmp_path, {"sgl_kvfetch.codecs": {"odd": "odd_module:mine"}}, package)
    path.syspath_prepend(tmp_path)
    with pytest.raises(FormatError, match=r"'odd' is .* of (first|second) 2\.1, (first|second) 2\.1; expected one"):
        get_codec("odd")


def test_names_of_ours_are_ours(tmp_path: Path, path: pytest.MonkeyPatch) -> None:
    points = {f"sgl_kvfetch.{group}": {"zstd": "no:x", "exact": "no:x", "http": "no:x"} for group in doors.GROUPS}
    install(tmp_path, points)
    path.syspath_prepend(tmp_path)
    assert get_codec("zstd").name == "zstd"
    assert quantiser_from_identity("exact").identity == "exact"
    open_store("http://x")
