"""The work of ``kvfetch search-layout``: a model's cells, a search for each tensor, and what becomes of the result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sgl_kvfetch.calibrate.model import KVModel, cut_windows, read_text
from sgl_kvfetch.cli.layout_results import layouts_json, layouts_table, plot_layouts, require_matplotlib, summary
from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.codecs.hevc import HevcCodec
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.frames import PLANES
from sgl_kvfetch.layout.search import CHANNEL_MAJOR, Found, Search
from sgl_kvfetch.layout.tiling import Tiling
from sgl_kvfetch.quant import Quantiser, make_quantiser
from sgl_kvfetch.quant.klt import KltQuantiser
from sgl_kvfetch.quant.profile import Profile, load_profile
from sgl_kvfetch.types import TensorName

# What a layout must save to be kept. Without one, each span length and resolution gets a channel-major layout of its
# own, and another that is hardly better for one length is worse for others.
MIN_GAIN = 0.01


@dataclass(frozen=True)
class Request:
    """The command's options."""

    model: str
    text: Path
    profile: Path | None
    quantiser: str
    target_kl: float
    tensors: tuple[TensorName, ...]
    resolution: str
    span_tokens: int
    num_windows: int
    workers: int
    device: str
    plot: Path | None
    json_file: Path | None
    dry_run: bool


def run(request: Request) -> None:
    """Search, print, write. Raises ConfigError before any work for what cannot end well."""
    _check(request)
    profile = load_profile(request.profile) if request.profile else None
    texts = read_text(request.text)
    model = KVModel(request.model, device=request.device)
    quantiser = _quantiser(request, model, profile)
    windows = cut_windows(
        [model.tokenise(text) for text in texts], request.num_windows, request.span_tokens, model.start
    )

    console = make_console()
    found: dict[TensorName, Found] = {}
    cells = _cells(model, quantiser, windows, request.tensors)
    sample = -(-model.num_layers // PLANES) // 2  # a middle layer group: the first is unlike the others
    for tensor in request.tensors:
        with _progress(tensor) as on_measured:
            found[tensor] = Search(
                cells.pop(tensor),
                request.resolution,
                HevcCodec().encode,
                sample=sample,
                workers=request.workers,
                on_measured=on_measured,
            ).run()
        console.print(layouts_table(tensor, found[tensor], request.span_tokens))
        console.print(summary(tensor, found[tensor]))

    if request.json_file:
        about = {
            "model": request.model,
            "text": str(request.text),
            "quantiser": quantiser.identity,
            "resolution": request.resolution,
            "span_tokens": request.span_tokens,
            "windows": request.num_windows,
        }
        _write(request.json_file, msgspec.json.format(msgspec.json.encode(layouts_json(about, found))))
    if request.plot:
        subtitle = f"{request.model}, {quantiser.identity}\nspans of {request.span_tokens} tokens, {request.resolution}"
        plot_layouts(request.plot, found, subtitle)
    if profile is not None and request.profile is not None and not request.dry_run:
        kept: dict[TensorName, Tiling | None] = {
            tensor: result.winner.candidate.tiling if result.gain >= MIN_GAIN else None
            for tensor, result in found.items()
        }
        replace(profile, tiling={**profile.tiling, **kept}).save(request.profile)
        for tensor, tiling in kept.items():
            console.print(f"{request.profile}: {tensor.upper()} is laid out {tiling or CHANNEL_MAJOR} from now on")


def _check(request: Request) -> None:
    if request.quantiser == "klt" and request.profile is None:
        raise ConfigError("klt needs --profile; kvfetch calibrate makes one (or take --quantiser uint8 or cachegen)")
    if request.quantiser != "klt" and request.profile is not None:
        raise ConfigError(f"--profile is for klt alone, and --quantiser is {request.quantiser}")
    for name, path in (("--plot", request.plot), ("--json", request.json_file)):
        if path is not None and not path.parent.is_dir():
            raise ConfigError(f"{name} {path}: there is no directory {path.parent}")
    if request.plot is not None:
        require_matplotlib()


def _quantiser(request: Request, model: KVModel, profile: Profile | None) -> Quantiser:
    if profile is None:
        return make_quantiser("uint8" if request.quantiser == "uint8" else "cachegen")
    expected = (profile.num_layers, profile.num_heads, profile.head_dim("k"), profile.head_dim("v"))
    found = (model.num_layers, model.num_heads, model.k_head_dim, model.v_head_dim)
    if found != expected:
        shape = "{} layers of {} KV heads of {} (K) and {} (V)".format
        raise ConfigError(f"profile {request.profile} is for {shape(*expected)}, {model.path} has {shape(*found)}")
    return KltQuantiser(profile, target_kl=request.target_kl)


def _cells(
    model: KVModel, quantiser: Quantiser, windows: list[torch.Tensor], tensors: tuple[TensorName, ...]
) -> dict[TensorName, list[torch.Tensor]]:
    """The integers of each tensor, ``(tokens, layers <= 3, heads, dim)`` a cell, layer groups of a window together."""
    cells: dict[TensorName, list[torch.Tensor]] = {tensor: [] for tensor in tensors}
    for window in windows:
        k, v = (x.to(torch.bfloat16).cpu() for x in model.kv(window))
        for tensor in tensors:
            integers = quantiser.quantise(k if tensor == "k" else v, tensor, 0).integers
            assert len(integers) == 1, quantiser.identity
            groups = range(0, model.num_layers, PLANES)
            cells[tensor] += [integers[0, :, first : first + PLANES].contiguous() for first in groups]
    return cells


@contextmanager
def _progress(tensor: TensorName) -> Iterator[Callable[[], None]]:
    """Yields what to call after each layout. Shows their number, on a terminal."""
    text = TextColumn("{task.description}: {task.completed} layouts measured")
    console = make_console(stderr=True)
    columns = (SpinnerColumn(), text, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(tensor.upper(), total=None)
        yield lambda: progress.advance(task)


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as e:
        raise ConfigError(f"{path} cannot be written: {e}") from e
