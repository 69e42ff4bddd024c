"""The work of ``kvfetch profile``."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import typer
from rich.table import Table

from sgl_kvfetch.adapt.measure import Sample, measure_profile
from sgl_kvfetch.adapt.profile import DecodeProfile
from sgl_kvfetch.cli.options import make_console
from sgl_kvfetch.cli.tables import make_table
from sgl_kvfetch.cli.units import format_size
from sgl_kvfetch.codecs import get_codec
from sgl_kvfetch.codecs.hevc import HevcCodec
from sgl_kvfetch.encode.targets import make_targets
from sgl_kvfetch.errors import ConfigError
from sgl_kvfetch.layout.choose import channel_layout
from sgl_kvfetch.layout.frames import PLANES


@dataclass(frozen=True)
class Request:
    """The command's options."""

    out: Path | None
    codecs: tuple[str, ...]
    resolutions: tuple[str, ...]
    tokens: int
    heads: int
    head_dim: int
    concurrency: int
    rounds: int
    seed: int
    as_json: bool


def run(request: Request) -> None:
    """Measure, print, write. Raises ConfigError."""
    if request.out is not None and not request.out.parent.is_dir():
        raise ConfigError(f"--out {request.out}: there is no directory {request.out.parent}")
    progress = make_console(stderr=True)
    samples = list(_samples(request))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a session is one thread, as in the decode pool
    try:
        profile = measure_profile(
            samples,
            device=platform.processor() or platform.machine(),
            source=_source(request),
            chunk_values=_num_values(request),
            max_concurrency=request.concurrency,
            rounds=request.rounds,
            on_step=lambda name: progress.print(f"measuring {name}"),
        )
    finally:
        torch.set_num_threads(threads)
    if request.as_json:
        typer.echo(profile.encode(), nl=False)
    else:
        console = make_console()
        console.print(_table(profile))
        console.print(f"a pool of {profile.num_sessions} decodes most chunks a second")
    if request.out is not None:
        try:
            request.out.write_bytes(profile.encode())
        except OSError as e:
            raise ConfigError(f"--out {request.out}: {e}") from e
        progress.print(f"wrote {request.out}")


def _num_values(request: Request) -> int:
    return request.tokens * PLANES * request.heads * request.head_dim


def _source(request: Request) -> str:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return f"kvfetch profile, {today}, CPU, {request.rounds} rounds, synthetic integers, seed {request.seed}"


def _samples(request: Request) -> Iterator[Sample]:
    """Each video codec at each resolution; a fast codec, to which pictures are nothing, once."""
    targets = make_targets(request.codecs, request.resolutions)
    integers = _integers(request)
    seen = set()
    for target in targets:
        codec = get_codec(target.codec)
        name = f"{target.codec} {target.resolution}" if isinstance(codec, HevcCodec) else target.codec
        if name in seen:
            continue
        seen.add(name)
        layout = channel_layout(request.heads, request.head_dim, request.tokens, target.resolution)
        bitstream = codec.encode(layout.to_frames(integers))
        shape = layout.num_frames(request.tokens), layout.height, layout.width
        yield Sample(name, len(bitstream), partial(codec.decode, bitstream, *shape))


def _integers(request: Request) -> torch.Tensor:
    """uint8 ``(tokens, 3, heads, dim)``: spread around 128, the first channels widely, the last hardly, as transform
    coefficients are."""
    generator = torch.Generator().manual_seed(request.seed)
    normal = torch.randn(request.tokens, PLANES, request.heads, request.head_dim, generator=generator)
    spread = torch.logspace(1, -1, request.heads * request.head_dim).view(request.heads, request.head_dim)
    return (normal * spread + 128).round().clamp(0, 255).to(torch.uint8)


def _table(profile: DecodeProfile) -> Table:
    columns = [f"{k} at once" for k in range(1, profile.max_concurrency + 1)]
    table = make_table(("variant",), ("size", *columns, "switch"))
    table.title = "Seconds a chunk"
    for v in profile.variants:
        times = [f"{t:.4f}" for t in v.decode_s]
        table.add_row(v.name, format_size(v.size_bytes), *times, f"{v.switch_s:.4f}")
    return table
