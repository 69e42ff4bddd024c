"""Draws the pictures of a store's page for docs/stores.md, in Debian's Chromium: light and dark, full and empty.

    python -m benchmarks.page_pictures [--seconds 120] [--out docs/images] [--whole]

A real store holds segments of SmolLM2 with its profile, under two names of models: the same 512 tokens again and again,
as if they were others. Before the pictures are taken, prompts are written, looked up and read for a while. ``--whole``
draws all of the page, in place of the first screen, and also one of a store with failures.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from benchmarks.codec.kv_model import KVModel, windows_of
from benchmarks.real_model import prose, real_model
from benchmarks.real_profile import PROMPTS_PART, real_profile
from benchmarks.report import make_parser, no_traceback, whole_number
from harness.store_process import StoreProcess
from sgl_kvfetch.codec.container.manifest import Manifest
from sgl_kvfetch.codec.container.segment import SegmentSpec, encode_segment
from sgl_kvfetch.codec.layout.frames import FLAT
from sgl_kvfetch.codec.quant.klt import KltQuantiser
from sgl_kvfetch.codec.quant.profile import load_profile
from sgl_kvfetch.keys import HeadSlice, Labels, Namespace
from sgl_kvfetch.stores.base import Store
from sgl_kvfetch.stores.http import HttpStore

_BLOCKS = 10  # of a prompt
_BLOCK_TOKENS = 512
_MODELS = ("SmolLM2-135M-Instruct", "SmolLM2-135M-tuned")
_PICTURES = {"light": (1100, 837, "light"), "dark": (1100, 837, "dark")}
_EMPTY = {f"empty-{name}": how for name, how in _PICTURES.items()}


@dataclass(frozen=True)
class _Block:
    """A stored block of tokens: its manifest but for its hash, its data objects, and the divergence it costs."""

    manifest: Manifest
    contents: tuple[bytes, ...]
    kl: float

    def at(self, page: int, hashes: Sequence[bytes]) -> _Block:
        """Return the block as a page of a prompt with these ``hashes``."""
        previous = hashes[page - 1] if page else None
        manifest = msgspec.structs.replace(
            self.manifest, first_page=page, previous_hash=previous, page_hashes=(hashes[page],)
        )
        return replace(self, manifest=manifest)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser("benchmarks.page_pictures", __doc__)
    parser.add_argument("--seconds", type=whole_number, default=120, help="how long the store is used first")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="where to write the pictures")
    parser.add_argument("--whole", action="store_true", help="draw the whole page, also with failures")
    args = parser.parse_args(argv)
    with no_traceback():
        block = _make_block(real_model(), real_profile())
    with (
        tempfile.TemporaryDirectory(prefix="kvfetch-page-") as root,
        StoreProcess(root, extra_args=["--capacity", "4GiB"]) as store,
    ):
        stop = threading.Event()
        user = threading.Thread(target=lambda: asyncio.run(_use(store.url, block, stop)))
        user.start()
        try:
            time.sleep(args.seconds)
            _draw(store.url, args.out, _PICTURES, args.whole)
        finally:
            stop.set()
            user.join()
        if args.whole:
            _fail(store.url)
            _draw(store.url, args.out, {f"failing-{name}": how for name, how in _PICTURES.items()}, args.whole)
    with tempfile.TemporaryDirectory(prefix="kvfetch-page-") as root, StoreProcess(Path(root) / "store") as store:
        _draw(store.url, args.out, _EMPTY, args.whole)
    return 0


def _fail(url: str) -> None:
    """Have some requests fail."""
    for path in ("healthz?write", "v1/segments?folder=none"):
        subprocess.run(["curl", "-s", "-o", "/dev/null", f"{url}/{path}"], check=True)


def _make_block(model_path: Path, profile_path: Path) -> _Block:
    """Return a block of real tokens, in two levels."""
    model, profile = KVModel(str(model_path)), load_profile(profile_path)
    klt = KltQuantiser(profile)
    (ids,) = windows_of(model, [prose()], PROMPTS_PART, 1, _BLOCK_TOKENS)
    k, v = (x.bfloat16() for x in model.kv(ids))
    namespace = Namespace(
        model="m", model_dtype="bfloat16", attention="mha", kv_dtype="bfloat16", page_size=_BLOCK_TOKENS,
        num_layers=k.shape[1], first_layer=0, num_heads=k.shape[2], k_head_dim=k.shape[3], v_head_dim=v.shape[3],
        quantiser=klt.identity,
    )  # fmt: skip
    spec = SegmentSpec(HeadSlice(namespace, range(k.shape[2])), klt, "ans", FLAT, span_pages=1, num_levels=2)
    coded = encode_segment(spec, {"k": k, "v": v}, 0, None, [bytes(32)])
    return _Block(coded.manifest, (coded.data, *coded.level_data), profile.kl_of(klt.step))


async def _put(store: Store, block: _Block) -> None:
    manifest = block.manifest
    for rows, content in zip(manifest.data, block.contents, strict=True):
        await store.put(manifest.data_name(rows), content)
    await store.put(manifest.key.manifest_name, manifest.encode())


async def _use(url: str, block: _Block, stop: threading.Event) -> None:
    """Write prompts, one a second, and read some of the latest."""
    store = HttpStore(url)
    try:
        number = 0
        while not stop.is_set():
            for segment in _prompt(block, number):
                await _put(store, segment)
            for earlier in (number, number - 3, number - 40):
                segments = _prompt(block, earlier)
                folder = segments[0].manifest.key.namespace
                found = await store.lookup(folder, [each.manifest.page_hashes[0] for each in segments])
                for segment in segments[: found.num_pages]:
                    rows = segment.manifest.variants[0]
                    await store.get(segment.manifest.data_name(rows), 0, len(segment.contents[0]))
            number += 1
            await asyncio.sleep(1)
    finally:
        await store.close()


def _prompt(block: _Block, number: int) -> list[_Block]:
    """Return the segments of a prompt, one a block."""
    model = _MODELS[number % 4 == 0]
    namespace = replace(block.manifest.namespace, model=model)
    labels = Labels(model=model, quantiser=f"klt {block.kl:.1e}")
    hashes = [hashlib.sha256(f"{number} {page}".encode()).digest() for page in range(_BLOCKS)]
    manifest = msgspec.structs.replace(block.manifest, namespace=namespace, labels=labels)
    return [replace(block, manifest=manifest).at(page, hashes) for page in range(_BLOCKS)]


def _draw(url: str, out: Path, pictures: Mapping[str, tuple[int, int, str]], whole: bool) -> None:
    for name, (width, height, scheme) in pictures.items():
        options = Options()
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
            options.add_argument(flag)
        options.binary_location = str(shutil.which("chromium"))
        driver = webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))
        try:
            media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
            size = {"width": width, "height": height, "deviceScaleFactor": 2 if width < 600 else 1}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"mobile": width < 600})
            driver.get(url)
            time.sleep(5)  # it draws when its requests are answered
            path = out / f"page-{name}.png"
            shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": whole})
            path.write_bytes(base64.b64decode(shot["data"]))
            print(f"wrote {path}")
        finally:
            driver.quit()


if __name__ == "__main__":
    sys.exit(main())
